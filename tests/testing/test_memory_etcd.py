"""The model of etcd does what a real one does; tests/etcd holds that to the same."""

import pytest

from averaging.testing import virtual_time
from tests.support.key_value_store import SCENARIOS, Scenario
from tests.support.memory_etcd import MemoryEtcd


@pytest.mark.parametrize("latency", [(0.0, 0.0), (0.001, 0.02)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_model_does_what_etcd_does(scenario: Scenario, latency: tuple[float, float]) -> None:
    async def main() -> None:
        etcd = MemoryEtcd(latency)

        async def compact() -> None:
            etcd.compact()

        await scenario(etcd.client(), compact)

    virtual_time.run(main())
