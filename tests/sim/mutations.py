"""All bugs that are planted, from the tables of the modules that have them."""

from __future__ import annotations

from tests.sim import (
    mutations_ahead,
    mutations_checkpoints,
    mutations_order,
    mutations_pages,
    mutations_peers,
    mutations_prefixes,
    mutations_promised,
    mutations_returns,
    mutations_samples,
    mutations_shared,
    mutations_speculation,
    mutations_succession,
    mutations_switches,
    mutations_tier,
    mutations_told,
    mutations_transfers,
    mutations_upgrades,
)
from tests.sim.planted import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *mutations_pages.MUTATIONS,
    *mutations_transfers.MUTATIONS,
    *mutations_ahead.MUTATIONS,
    *mutations_told.MUTATIONS,
    *mutations_promised.MUTATIONS,
    *mutations_shared.MUTATIONS,
    *mutations_samples.MUTATIONS,
    *mutations_returns.MUTATIONS,
    *mutations_tier.MUTATIONS,
    *mutations_prefixes.MUTATIONS,
    *mutations_checkpoints.MUTATIONS,
    *mutations_peers.MUTATIONS,
    *mutations_succession.MUTATIONS,
    *mutations_switches.MUTATIONS,
    *mutations_upgrades.MUTATIONS,
    *mutations_order.MUTATIONS,
    *mutations_speculation.MUTATIONS,
)
