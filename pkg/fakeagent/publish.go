package fakeagent

// unpublished is what has changed since it was last published.
type unpublished struct {
	groups   map[*group]struct{}
	machines map[*machine]struct{}
	claims   map[*claim]struct{}
	clusters map[clusterKey]struct{}
}

func newUnpublished() unpublished {
	return unpublished{
		groups:   map[*group]struct{}{},
		machines: map[*machine]struct{}{},
		claims:   map[*claim]struct{}{},
		clusters: map[clusterKey]struct{}{},
	}
}

func (a *Agent) touch(g *group) { a.changed.groups[g] = struct{}{} }

func (a *Agent) touchClaim(c *claim) { a.changed.claims[c] = struct{}{} }

func (a *Agent) touchCluster(key clusterKey) { a.changed.clusters[key] = struct{}{} }

// touchMachine also touches the claim, which includes its machine.
func (a *Agent) touchMachine(m *machine) {
	a.changed.machines[m] = struct{}{}
	if m.claim != nil {
		a.touchClaim(m.claim)
	}
}

// publish makes changes visible to callers. a.mu must be held.
func (a *Agent) publish() {
	for g := range a.changed.groups {
		a.touchCluster(g.cluster)
		switch a.groups[g.id] {
		case g:
			a.groupView.put(g.cluster, g.id, a.renderGroup(g))
		case nil:
			a.groupView.remove(g.cluster, g.id)
		}
	}
	for m := range a.changed.machines {
		a.touchCluster(m.group.cluster)
		switch {
		case m.gone:
			a.machineView.remove(m.group.cluster, m.name)
		case m.appeared:
			a.machineView.put(m.group.cluster, m.name, m.render())
		}
	}
	for c := range a.changed.claims {
		a.touchCluster(c.cluster)
		if a.claims[c.cluster][c.id] == c {
			a.claimView.put(c.cluster, c.id, c.render())
		} else {
			a.claimView.remove(c.cluster, c.id)
		}
	}
	// The last, because it counts what was published above.
	for key := range a.changed.clusters {
		if shown := a.renderCluster(key); shown != nil {
			a.clusterView.put(clusterKey{}, key.String(), shown)
		} else {
			a.clusterView.remove(clusterKey{}, key.String())
		}
	}
	a.changed = newUnpublished()
}
