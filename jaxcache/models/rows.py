"""What single rows of a step may bring along besides their token."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class RowInputs(NamedTuple):
    """Of `T` rows; `None` where no row of any step has it, so that nothing is compiled for it."""

    adapter: Int[Array, " T"] | None = None
    """The slot of the row's adapter, from 1 on; 0 for none (`models.lora`)."""
    embeds: Float[Array, "T D"] | None = None
    """What the first layer takes in the place of the token's embedding, where `given`."""
    given: Bool[Array, " T"] | None = None


NO_ROW_INPUTS = RowInputs()
