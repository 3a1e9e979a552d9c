"""All cases of the table of compatibility, by name."""

from tests.models.case import Case
from tests.models.families import (
    decoders,
    diffusion,
    encoders,
    images,
    learned_sparsity,
    own_attention,
    sequence_mixers,
    torch_modules,
)
from tests.models.families.automatic import PREFIX, automatic_case

FAMILIES = {
    "decoders": decoders.CASES,
    "encoders, and encoders with decoders": encoders.CASES,
    "images": images.CASES,
    "diffusion": diffusion.CASES,
    "torch.nn": torch_modules.CASES,
    "learned sparsity": learned_sparsity.CASES,
    "attention by hand, and flex_attention": own_attention.CASES,
    "sequence mixers: state-space models, gated delta rules, linear attention, "
    "convolutions": sequence_mixers.CASES,
}
CASES: dict[str, Case] = {
    case.name: case for family in FAMILIES.values() for case in family
}


def case_of(name: str) -> Case:
    """The case of that name, of the table or made automatically."""
    return automatic_case(name) if name.startswith(PREFIX) else CASES[name]
