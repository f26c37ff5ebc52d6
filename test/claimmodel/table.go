package main

import (
	"time"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/section5"
)

// longest bounds the searches that cannot be complete, and the random runs.
const longest = 40 * time.Second

// table is the standard runs. The short one keeps those that are done in seconds, and fewer states of others.
func table(short bool) []row {
	return append(section5Table(short), engineTable(short)...)
}

// whole is a search that must visit every state and find nothing.
func whole[S any](name string, m explore.Model[S], ignore ...string) row {
	return row{name: name, complete: true, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: 50_000_000, Ignore: ignore, StopAtFirst: true})
	}}
}

// part is a search of as many states, not all, that must find nothing.
func part[S any](name string, m explore.Model[S], states int, ignore ...string) row {
	return row{name: name, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: states, For: longest, Ignore: ignore, StopAtFirst: true})
	}}
}

// walks are random runs that must find nothing.
func walks[S any](name string, m explore.Model[S], n int) row {
	return row{name: name, run: func() explore.Result {
		return explore.Walk(m, explore.Options{Walks: n, Depth: 250, Seed: 1, For: longest, StopAtFirst: true})
	}}
}

// breaks is a search that must find a violation.
func breaks[S any](name, violation string, m explore.Model[S], ignore ...string) row {
	return row{name: name, violation: violation, run: func() explore.Result {
		return explore.Search(m, explore.Options{States: 30_000_000, Ignore: ignore, Until: violation})
	}}
}

// benign is the violation that the first model reports and that the rules make harmless: nothing is named for the claim, and
// the entry becomes a spare.
const benign = "E4"

func section5Table(short bool) []row {
	rules := section5.AllRules
	without := func(names string) section5.Rules {
		r, err := section5.ParseRules(names)
		if err != nil {
			panic(err) // the names are in this file
		}
		return r
	}
	rows := []row{
		breaks("section 5 as first worded: 1 claim", "I3", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1}),
		breaks("section 5 without label", "E1", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Rules: without("label")}, benign),
		breaks("section 5 without absent", "E2", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Rules: without("absent")}, benign),
		breaks("section 5 without end", "E3", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Rules: without("end")}, benign),
		breaks("section 5, lowered before the deletion is complete", "I3",
			&section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: rules(), Early: true}, benign),
	}
	if short {
		return rows
	}
	return append(rows,
		whole("section 5: 1 claim, 1 outsider, floor 0", &section5.Protocol{Claims: 1, StaleAgents: 1, Outsiders: 1, Rules: rules()}, benign),
		breaks("section 5 without mcfirst", "E1",
			&section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: without("mcfirst")}, benign),
		breaks("section 5 without the fence", "I3",
			&section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: rules(), NoFence: true}, benign),
		whole("section 5: 1 claim, 1 outsider", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: rules()}, benign),
		breaks("section 5 without seq", "A1",
			&section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: rules(), NoSeq: true}, benign),
		breaks("section 5 without enter", "I2", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Outsiders: 1, Rules: without("enter")}, benign),
		breaks("section 5 without account", "I2", &section5.Protocol{Claims: 2, Floor: 1, StaleAgents: 1, Rules: without("account")}, benign),
		breaks("section 5 without release", "I3", &section5.Protocol{Claims: 2, Floor: 1, StaleAgents: 1, Rules: without("release")}, benign),
		breaks("section 5 without name", "I6", &section5.Protocol{Claims: 2, Floor: 1, StaleAgents: 1, Rules: without("name")}, benign),
		whole("section 5: 1 claim, 1 raise", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 1, Raises: 1, Rules: rules()}, benign),
		whole("section 5: 2 claims, live agents, 1 outsider, 1 raise",
			&section5.Protocol{Claims: 2, Floor: 1, Outsiders: 1, Raises: 1, Rules: rules()}, benign),
		part("section 5: 2 claims", &section5.Protocol{Claims: 2, Floor: 1, StaleAgents: 1, Rules: rules()}, 20_000_000, benign),
		part("section 5: 1 claim, 2 stale agents", &section5.Protocol{Claims: 1, Floor: 1, StaleAgents: 2, Rules: rules()}, 20_000_000, benign),
	)
}

type world = engine.Protocol

// with returns the world changed.
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
	rolling   = world{Groups: 1, Claims: 1, Floor: 1, Machines: 5, RollingUpdate: true, Rollouts: 1}
)

func engineTable(short bool) []row {
	adoption := with(one, func(w *world) { w.Adopt, w.Outsiders = true, 1 })
	paused := with(sets, func(w *world) { w.Pauses = 1 })
	rows := []row{
		whole("engine: 1 claim", &one),
		whole("engine: 2 MachineSets", &sets),
		whole("engine: 2 MachineSets, a human's pause", &paused),
		whole("engine: 2 MachineSets, wiped ledger", &setsWiped),
		whole("engine: calls late and out of order, tombstones", &late),
		whole("engine: adoption, 1 outsider", &adoption),
	}
	for _, control := range []struct {
		rule      engine.Rule
		violation string
		in        world
	}{
		{engine.Fence, "I3", one},
		{engine.DeletionComplete, "I3", one},
		{engine.PauseForSeveralSets, "I3", sets},
		{engine.CompletePause, "L1", sets},
		{engine.ObserveLoweredSet, "I3", sets},
		{engine.ReleasedTogether, "I3", sets},
		{engine.PauseToShrink, "I3", one},
		{engine.KeepFloor, "I6", with(one, func(w *world) { w.Young = true })},
		{engine.RebuildFromClaims, "E2", wiped},
		{engine.RebuildSafely, "I6", wiped},
		{engine.RebuildReleases, "I4", wiped},
		{engine.FenceLost, "I3", wiped},
		{engine.UnpauseLeftOver, "I4", setsWiped},
		{engine.FloorFromDifference, "I2", with(one, func(w *world) { w.Raises = 1 })},
		{engine.LateForget, "T1", late},
		{engine.Tombstone, "T1", late},
		{engine.MaxSize, "I6", world{Groups: 1, Claims: 2, Max: 1, Machines: 4}},
		{engine.Anchor, "I1", world{Groups: 2, Claims: 2, Machines: 4}},
	} {
		in := with(control.in, func(w *world) { w.Without = control.rule })
		rows = append(rows, breaks("engine without "+control.rule.String(), control.violation, &in))
	}
	if short {
		return rows
	}
	return append(rows, engineLongTable()...)
}

// engineLongTable has the runs that take longer: those with agents that act late, and random ones.
func engineLongTable() []row {
	change := func(w world, f func(w *world)) *world {
		w = with(w, f)
		return &w
	}
	rows := []row{
		whole("engine: wiped ledger", &wiped),
		whole("engine: creation blocked for good", change(one, func(w *world) { w.Blocks, w.BlockedForGood = 1, true })),
		whole("engine: 2 MachineSets, 1 outsider", change(sets, func(w *world) { w.Outsiders = 1 })),
		whole("engine: 2 MachineSets, 1 human lowers", change(sets, func(w *world) { w.Lowers = 1 })),
		whole("engine: 2 MachineSets, a rollout (OnDelete)", change(sets, func(w *world) { w.Rollouts = 1 })),
		whole("engine: 2 claims, 2 groups, max size 1", &world{Groups: 2, Claims: 2, Max: 1, Machines: 4}),
		whole("engine: 2 claims, adoption", change(one, func(w *world) { w.Claims, w.Adopt = 2, true })),
		part("engine: 1 claim, 1 stale agent", &stale, 2_000_000),
		part("engine: 2 MachineSets, a human's pause, 1 stale agent", change(sets, func(w *world) { w.Pauses, w.StaleAgents = 1, 1 }), 2_000_000),
		part("engine: 2 groups, max size 1, 2 claims, 1 stale agent",
			&world{Groups: 2, Claims: 2, Max: 1, Machines: 3, StaleAgents: 1}, 2_000_000),
		part("engine: hooks, 1 outsider, 1 stale agent",
			&world{Groups: 1, Claims: 1, Machines: 3, Hooks: true, Outsiders: 1, StaleAgents: 1}, 2_000_000),
		part("engine: a rollout (RollingUpdate)", &rolling, 2_000_000),
		part("engine: 2 claims, wiped ledger", change(wiped, func(w *world) { w.Claims = 2 }), 2_000_000),
		walks("engine: random; everything but RollingUpdate, 2 stale agents", &world{
			Groups: 1, Claims: 2, Floor: 1, StaleAgents: 2, Outsiders: 1, Raises: 1, Lowers: 1, Rollouts: 1, Hooks: true,
		}, 100_000),
		walks("engine: random; RollingUpdate, 2 claims", change(rolling, func(w *world) { w.Claims = 2 }), 100_000),
		walks("engine: random; 3 claims, 2 groups, max size 2, 1 stale agent",
			&world{Groups: 2, Claims: 3, Max: 2, StaleAgents: 1}, 100_000),
	}
	for _, control := range []struct {
		rule      engine.Rule
		violation string
		in        world
	}{
		{engine.ShrinkInLedger, "I3", stale},
		{engine.TestPause, "P2", with(sets, func(w *world) { w.Pauses, w.StaleAgents = 1, 1 })},
		{engine.LiveAfterLedger, "E2", stale},
		{engine.CheckLedger, "E3", with(stale, func(w *world) { w.Floor = 0 })},
		{engine.TestMachine, "E1", with(stale, func(w *world) { w.Floor, w.Outsiders = 0, 1 })},
	} {
		in := with(control.in, func(w *world) { w.Without = control.rule })
		rows = append(rows, breaks("engine without "+control.rule.String(), control.violation, &in))
	}
	slot := with(rolling, func(w *world) { w.Claims, w.Without = 2, engine.SlotTaken })
	return append(rows, row{name: "engine without slot-taken", violation: "I3", run: func() explore.Result {
		return explore.Walk(&slot, explore.Options{Walks: 1_000_000, Depth: 150, Seed: 1, Until: "I3"})
	}})
}
