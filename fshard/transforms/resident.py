"""resident: how long full tensors stay; it changes no value."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fshard.transforms.base import ShardTransform
from fshard.tree import Residency, Spec


@dataclass(frozen=True)
class _Resident(ShardTransform):
    residency: Residency

    @property
    def new_gradients(self) -> None:
        return None

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        if any(isinstance(stage, _Resident) for stage in before):
            return (
                "expected one strategy that says how long full tensors stay, got two; take the other's parts by "
                "themselves"
            )
        return None

    def layout(self, spec: Spec) -> Spec:
        return replace(spec, residency=self.residency)


def resident(residency: Residency) -> ShardTransform:
    """Say in a composition how long full tensors stay; see `Residency`.

    Args:
        residency: The policy, which the leaves' specs then carry.

    Returns:
        The transform, which passes tensors through.
    """
    return _Resident(residency)
