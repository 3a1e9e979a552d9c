"""Calls that change the number of tokens take windows from neighbours, and no more."""

import pytest
import torch

from tests.golden.capture import sharded
from tests.golden.golden_text import assert_golden, table
from tests.support.forms.strided_forms import FORMS, TWINS, WIDTH, Model

MESH_AXES = {"cp": 3}


def captured(mesh, name, tokens=36):
    torch.manual_seed(0)
    return sharded(Model(name), mesh, 2, tokens, WIDTH)


def test_windows_of_neighbours(mesh):
    """37 tokens, 13, 13 and 11 of them, become 19: windows of 3 for 7, 7 and 5."""
    texts = {}
    for name in ("halves", "doubles", "maxima"):
        text = captured(mesh, name, 37).lines("= cp_move_tokens", "volution(", "_pool(")
        texts[name] = text
    assert_golden(
        table(texts),
        """\
halves:
  cp_move_tokens = cp_move_tokens([mT], 2, 'windows', 15, 14, 1, 1, 3,
      fill=0)  # [2, 16, 45] S(2)
  padded_convolution = padded_convolution(cp_move_tokens, cp_replicate_4,
      cp_replicate_5, (2,), ((0, 0),), (1,), 1, 2)  # [2, 16, 21] S(2)
  cp_move_tokens_1 = cp_move_tokens([padded_convolution], 2, 'slice', None, 19,
      1)  # [2, 16, 19] S(2)
doubles:
  cp_move_tokens = cp_move_tokens([mT], 2, 'pad', 0, 2, 'constant')  # [2, 16, 39] S(2)
  transposed_convolution = transposed_convolution(cp_move_tokens, cp_replicate_4,
      cp_replicate_5, (2,), (0,), (0,), 1, (1,), 2)  # [2, 16, 78] S(2)
  cp_move_tokens_1 = cp_move_tokens([transposed_convolution], 2, 'slice', 1, 75,
      1)  # [2, 16, 74] S(2)
maxima:
  cp_move_tokens = cp_move_tokens([mT], 2, 'windows', 15, 14, 1, 1, 3,
      fill=-inf)  # [2, 16, 45] S(2)
  windowed_pool = windowed_pool('max_pool1d', cp_move_tokens, (3,), (2,), (0,), (1,),
      2)  # [2, 16, 21] S(2)
  cp_move_tokens_1 = cp_move_tokens([windowed_pool], 2, 'slice', None, 19,
      1)  # [2, 16, 19] S(2)""",
    )


@pytest.mark.parametrize("name", FORMS)
def test_nothing_is_gathered(mesh, name):
    found = captured(mesh, name)
    assert len(found.ctx.findings.plans) == 2
    assert "cp_replicated" not in found.text


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays(mesh, name):
    found = captured(mesh, name)
    assert "'windows'" not in found.text
    assert "cp_replicated" in found.text
