"""Maps learned from the loaders of a real vLLM; see scripts/engines.sh."""

import pytest

pytest.importorskip("vllm")

import vllm_configs as configs
import vllm_maps


@pytest.mark.parametrize("ranks", [1, 2])
def test_writing_by_the_map_is_what_vllms_loader_does(ranks):
    names = list(configs.ARCHITECTURES)
    found = vllm_maps.compare_all(names, seed=10 + ranks, ranks=ranks)
    assert len(found) == ranks * len(names)
    assert [(each["model"], each["rank"], each["differing"]) for each in found if each["differing"]] == []
    assert [each["computed"] for each in found if each["computed"]] == []
    for name in names:
        shares = [each["share"] for each in found if each["model"] == name]
        assert len(shares) == ranks and sum(shares) >= 1, (name, shares)  # what both hold counts twice
        assert shares == [1] if ranks == 1 else max(shares) < 0.95, (name, shares)
