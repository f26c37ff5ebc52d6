package main

import (
	"time"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// longest bounds the searches that cannot be complete, and the random runs.
const longest = 40 * time.Second

// whole is a search that must visit every state and must find nothing.
func whole(name string, m *world) row {
	return row{name: name, complete: true, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: 50_000_000, StopAtFirst: true})
	}}
}

// partStates limits the searches of worlds that are too large to be searched completely.
const partStates = 2_000_000

// part is a search of some of the states that must find nothing.
func part(name string, m *world) row {
	return row{name: name, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: partStates, For: longest, StopAtFirst: true})
	}}
}

// walks are random runs that must find nothing.
func walks(name string, m *world, n int) row {
	return row{name: name, run: func() explore.Result {
		return explore.Walk(m, explore.Options{Walks: n, Depth: 250, Seed: 1, For: longest, StopAtFirst: true})
	}}
}

// breaks is a search that must find a violation.
func breaks(name, violation string, m *world) row {
	return row{name: name, violation: violation, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: 30_000_000, Until: violation})
	}}
}

type world = engine.Protocol

// with returns the world with the change applied.
func with(w world, change func(w *world)) world {
	change(&w)
	return w
}

// Small worlds that most runs start from.
var (
	one       = world{Groups: 1, Claims: 1, Floor: 1, Machines: 3}
	sets      = world{Groups: 1, Claims: 1, Floor: 2, Sets: 2, Machines: 4}
	wiped     = with(one, func(w *world) { w.Wipes = 1 })
	setsWiped = with(sets, func(w *world) { w.Wipes = 1 })
	late      = with(one, func(w *world) { w.Repeat, w.Forget = true, true })
	stale     = with(one, func(w *world) { w.StaleAgents = 1 })
	sized     = with(one, func(w *world) { w.Max, w.Sizes = 2, 1 })
	atOnce    = world{Groups: 1, Claims: 1, Machines: 2, AtOnce: true, StaleAgents: 1}
	rolling   = world{Groups: 1, Claims: 1, Floor: 1, Machines: 5, RollingUpdate: true, Rollouts: 1}
)

// table returns the standard runs, or for short only those that take seconds.
func table(short bool) []row {
	rows := []row{
		whole("1 claim", &one),
		whole("2 MachineSets", &sets),
		whole("2 MachineSets, a person's pause", change(sets, func(w *world) { w.Pauses = 1 })),
		whole("2 MachineSets, wiped ledger", &setsWiped),
		whole("calls late and out of order, tombstones", &late),
		whole("adoption, 1 outsider", change(one, func(w *world) { w.Adopt, w.Outsiders = true, 1 })),
		whole("return, wiped ledger", change(wiped, func(w *world) { w.Return = true })),
		whole("return, 1 outsider", change(one, func(w *world) { w.Return, w.Outsiders = true, 1 })),
		whole("return, a size is set, or broken", change(sized, func(w *world) { w.Return = true })),
		whole("a size is set, or broken", &sized),
		whole("1 claim, admitted at once on old caches", &atOnce),
		whole("1 claim, admitted at once while a size is set", change(sized, func(w *world) { w.AtOnce, w.StaleAgents = true, 1 })),
		without(engine.TestSizes, "I6", with(sized, func(w *world) { w.StaleAgents = 1 })),
		without(engine.ReleasedTogether, "I3", sets),
		without(engine.LateForget, "T1", late),
		without(engine.Tombstone, "T1", late),
		without(engine.Anchor, "I1", world{Groups: 2, Claims: 2, Machines: 4}),
	}
	if short {
		return rows
	}
	return append(rows,
		whole("wiped ledger", &wiped),
		whole("creation blocked for good", change(one, func(w *world) { w.Blocks, w.BlockedForGood = 1, true })),
		whole("2 MachineSets, 1 outsider", change(sets, func(w *world) { w.Outsiders = 1 })),
		whole("2 MachineSets, a person lowers", change(sets, func(w *world) { w.Lowers = 1 })),
		whole("2 MachineSets, a rollout (OnDelete)", change(sets, func(w *world) { w.Rollouts = 1 })),
		whole("2 claims, 2 groups, max size 1", &world{Groups: 2, Claims: 2, Max: 1, Machines: 4}),
		whole("2 claims, adoption", change(one, func(w *world) { w.Claims, w.Adopt = 2, true })),
		whole("2 claims, adoption and return", change(one, func(w *world) { w.Claims, w.Adopt, w.Return = 2, true, true })),
		whole("2 MachineSets, return, a person's pause", change(sets, func(w *world) { w.Return, w.Pauses = true, 1 })),
		part("1 claim, return, 1 stale agent", change(stale, func(w *world) { w.Return = true })),
		part("1 claim, 1 stale agent", &stale),
		part("2 MachineSets, a person's pause, 1 stale agent", change(sets, func(w *world) { w.Pauses, w.StaleAgents = 1, 1 })),
		part("2 groups, max size 1, 2 claims, 1 stale agent",
			&world{Groups: 2, Claims: 2, Max: 1, Machines: 3, StaleAgents: 1}),
		part("1 outsider, 1 stale agent", &world{Groups: 1, Claims: 1, Machines: 3, Outsiders: 1, StaleAgents: 1}),
		part("2 claims, admitted at once on old caches", change(atOnce, func(w *world) { w.Claims, w.Machines = 2, 3 })),
		part("a person raises twice", change(one, func(w *world) { w.Raises, w.Machines = 2, 6 })),
		part("a rollout (RollingUpdate)", &rolling),
		part("2 claims, wiped ledger", change(wiped, func(w *world) { w.Claims = 2 })),
		walks("random; everything but RollingUpdate, 2 stale agents", &world{
			Groups: 1, Claims: 2, Floor: 1, StaleAgents: 2, Outsiders: 1, Raises: 1, Lowers: 1, Rollouts: 1,
		}, 100_000),
		walks("random; RollingUpdate, 2 claims", change(rolling, func(w *world) { w.Claims = 2 }), 100_000),
		walks("random; 3 claims, 2 groups, max size 2, 1 stale agent",
			&world{Groups: 2, Claims: 3, Max: 2, StaleAgents: 1}, 100_000),
		without(engine.TestPause, "P2", with(sets, func(w *world) { w.Pauses, w.StaleAgents = 1, 1 })),
		without(engine.TestEntry, "E2", with(atOnce, func(w *world) { w.Claims, w.Machines = 2, 3 })),
		without(engine.LiveAfterLedger, "E2", stale),
		without(engine.CheckLedger, "E1", with(stale, func(w *world) { w.Floor = 0 })),
		without(engine.TestMachine, "E1", with(stale, func(w *world) { w.Floor, w.Outsiders = 0, 1 })),
	)
}

// change is [with] for a single run.
func change(w world, f func(w *world)) *world {
	w = with(w, f)
	return &w
}

// without must find the violation that a rule prevents. The rules of the decision itself are left
// out by mutants of its source (make mutants).
func without(rule engine.Rule, violation string, w world) row {
	w.Without = rule
	return breaks("without "+rule.String(), violation, &w)
}
