"""Small configurations and inputs are made from names, whatever library has them."""

import pytest
import torch

from tests.models.families import automatic_sizes
from tests.models.families.automatic import (
    PREFIX,
    NoConfigurationError,
    automatic_case,
    families,
    library_divides,
)
from tests.models.float64 import in_float64
from tests.models.outcome import Verdict
from tests.models.run_case import run_case
from tests.models.setting import Setting
from tools.models import sweep


def made(
    num_layers: int = 20,
    attention_head_dim: int = 128,
    num_attention_heads: int = 24,
    text_embed_dim: int = 4096,
    in_channels: int | None = None,
    out_channels: int | None = None,
    text_layers: list[int] | None = None,
    patch_size: tuple[int, ...] = (1, 2, 2),
    rope_axes_dim: tuple[int, ...] = (16, 56, 56),
    depths: tuple[int, ...] = (2, 2, 18, 2),
    dropout: float = 0.1,
    mlp_ratio: float = 4.0,
    qk_norm: bool = True,
):
    """Takes what many constructors of models take."""


def test_names_say_sizes():
    sizes = automatic_sizes.sizes_of(made, unset=0)
    assert sizes == {
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "text_embed_dim": 64,
        "rope_axes_dim": (8, 4, 4),
        "depths": (2, 2, 2, 2),
        "dropout": 0.0,
    }
    more = automatic_sizes.sizes_of(made, unset=1)
    assert more == sizes | {"in_channels": 4, "text_layers": [0, 1, 0, 1]}
    most = automatic_sizes.sizes_of(made, unset=automatic_sizes.UNSET)
    assert most == more | {"out_channels": 4, "rope_axes_dim": (4, 4, 4, 4)}


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_parts_of_a_head_are_even(axes):
    parts = automatic_sizes.head_parts(axes)
    assert len(parts) == axes
    assert sum(parts) == automatic_sizes.HEAD_DIM
    assert not any(part % 2 for part in parts)


def test_a_refused_size_is_left_out():
    def make(**sizes):
        if "depth" in sizes:
            raise TypeError("unexpected keyword argument 'depth'")
        return sizes

    assert automatic_sizes.accepted(make, {"depth": 2, "dim": 64}) == {"dim": 64}


def test_families_are_those_with_attention():
    assert {"WanTransformer3DModel", "FluxTransformer2DModel"} < set(
        families("diffusers")
    )
    found = set(families("timm"))
    assert {"vision_transformer", "swin_transformer", "qwen3_vit", "convit"} < found
    assert not {"vgg", "resnet", "resnest"} & found


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("diffusers/LTXVideoTransformer3DModel", (2, 36, 4)),  # latents are tokens
        ("diffusers/SD3Transformer2DModel", (2, 4, 12, 12)),
        ("diffusers/WanTransformer3DModel", (2, 4, 3, 12, 12)),
        ("diffusers/CogVideoXTransformer3DModel", (2, 3, 4, 12, 12)),  # frames first
        ("diffusers/AceStepTransformer1DModel", (2, 36, 2)),  # beside a condition
        ("diffusers/Kandinsky6Transformer3DModel", (2, 3, 12, 12, 9)),  # and its mask
        ("diffusers/JoyImageEditPlusTransformer3DModel", (2, 36, 4, 1, 2, 2)),
        ("timm/naflexvit", (2, 3, 64, 64)),
    ],
)
def test_a_case_is_small_and_runs(name, shape):
    case = automatic_case(PREFIX + name)
    inputs = case.inputs(0)
    given = inputs["x" if name.startswith("timm") else "hidden_states"]
    assert given.shape == shape
    model = case.model()
    assert sum(x.numel() for x in model.parameters()) < 10**6
    with torch.no_grad():
        model(**inputs)


def test_parts_are_small_whatever_their_type():
    model = automatic_case(f"{PREFIX}seq2seq/voxtral").model()
    assert model.config.text_config.hidden_size == automatic_sizes.WIDTH
    assert model.config.audio_config.hidden_size == automatic_sizes.WIDTH
    assert sum(x.numel() for x in model.parameters()) < 10**6


def test_float32_by_hand_is_float64():
    def model(x):
        plain = torch.full((), 0.1)
        return x.float(), x.to(torch.float32), x.to(dtype=torch.float32), plain

    given = torch.ones(2, dtype=torch.float64)
    results = in_float64(model)(x=given)
    assert {x.dtype for x in results} == {torch.float64}
    assert {x.dtype for x in model(given)} == {torch.float32}


def test_an_unknown_input_is_named():
    with pytest.raises(NoConfigurationError, match="no value for the input"):
        automatic_case(f"{PREFIX}diffusers/Cosmos3OmniTransformer")


def test_libraries_say_what_they_divide():
    claims = {
        "causal/llama": True,
        "causal/gemma2": False,  # some layers have windows
        "diffusers/WanTransformer3DModel": True,
        "diffusers/DiTTransformer2DModel": False,
        "timm/vision_transformer": None,
    }
    assert {name: library_divides(PREFIX + name) for name in claims} == claims


def test_a_missing_package_is_named(monkeypatch, capsys):
    def missing(kind):
        raise ModuleNotFoundError("No module", name="timm")

    monkeypatch.setattr(sweep, "families", missing)
    assert sweep._installed("timm") == []
    assert "timm is not installed" in capsys.readouterr().err


def test_the_page_counts_what_libraries_divide():
    page = sweep.markdown(
        {
            "setup": {"processor": "x", "date": "y", "torch": "z"}
            | dict.fromkeys(sweep.LIBRARIES, "1"),
            "runs": [
                {
                    "case": f"{PREFIX}diffusers/A",
                    "verdict": "exact",
                    sweep.DIVIDED: True,
                },
                {
                    "case": f"{PREFIX}diffusers/B",
                    "verdict": "exact",
                    sweep.DIVIDED: False,
                },
                {"case": f"{PREFIX}timm/c", "verdict": "exact", sweep.DIVIDED: None},
            ],
        }
    )
    assert "Of 2 exact families, the library claims to divide 1." in page


def test_ranks_compute_in_float64(pools):
    """As a row does that float32 rounds by more than its bound."""
    outcome = run_case(pools, "small_gpt/default", Setting(double=True))
    assert outcome.verdict is Verdict.EXACT and outcome.error < 1e-12
