package fakeagent

// dirt is what changed since it was last shown.
type dirt struct {
	groups   map[*group]struct{}
	machines map[*machine]struct{}
	claims   map[*claim]struct{}
}

func newDirt() dirt {
	return dirt{
		groups:   map[*group]struct{}{},
		machines: map[*machine]struct{}{},
		claims:   map[*claim]struct{}{},
	}
}

func (a *Agent) touch(g *group) { a.changed.groups[g] = struct{}{} }

func (a *Agent) touchClaim(c *claim) { a.changed.claims[c] = struct{}{} }

// touchMachine also touches the claim, which shows its machine.
func (a *Agent) touchMachine(m *machine) {
	a.changed.machines[m] = struct{}{}
	if m.claim != nil {
		a.touchClaim(m.claim)
	}
}

// publish shows callers what changed. It is called with the lock held.
func (a *Agent) publish() {
	now := a.now()
	for g := range a.changed.groups {
		shown := false
		switch a.groups[g.id] {
		case g:
			shown = a.groupFeed.put(g.cluster, g.id, g.render(now))
		case nil:
			shown = a.groupFeed.remove(g.cluster, g.id)
		}
		if shown {
			a.generation++
		}
	}
	for m := range a.changed.machines {
		switch {
		case m.gone:
			a.machineFeed.remove(m.group.cluster, m.name)
		case m.appeared:
			a.machineFeed.put(m.group.cluster, m.name, m.render())
		}
	}
	for c := range a.changed.claims {
		if a.claims[c.cluster][c.id] == c {
			a.claimFeed.put(c.cluster, c.id, c.render())
		} else {
			a.claimFeed.remove(c.cluster, c.id)
		}
	}
	a.changed = newDirt()
}
