package engine

// plan is the input of a reconcile of a MachineDeployment: its cache's view of its MachineSets. It
// follows Cluster API's rollout planner (core/reconcilers/machinedeployment).
type plan struct {
	newest, replicas        int
	spec, status, available [maxSets]int
}

// surge of a RollingUpdate. No Machine may be unavailable.
const surge = 1

func (p *Protocol) planOf(s *State, g int) plan {
	at := &s.groups[g]
	out := plan{newest: int(at.md.template), replicas: int(at.md.replicas)}
	for i, set := range at.sets {
		out.spec[i], out.status[i] = int(set.replicas), at.seenOf(i)
		if set.foreign != 0 {
			out.spec[i] = int(set.saw)
		}
	}
	for i, m := range at.seen {
		if m.phase == joined {
			out.available[at.machines[i].set]++
		}
	}
	return out
}

// taken returns the number of replicas that count against the newest MachineSet's room: deleted
// Machines count until they are gone.
func (l *plan) taken() int {
	n := 0
	for i := range l.spec {
		n += max(l.spec[i], l.status[i])
	}
	return n
}

// newer returns the newest MachineSet's new replicas, with the given surge over all MachineSets.
func (l *plan) newer(more int) int {
	n := l.spec[l.newest]
	if n > l.replicas {
		return l.replicas
	}
	return n + max(0, min(l.replicas+more-l.taken(), l.replicas-n))
}

// onDelete scales the newest MachineSet down to the replicas and the old ones down to their
// existing Machines, and takes the rest from the oldest ones.
func (l *plan) onDelete() [maxSets]int {
	to := l.spec
	to[l.newest] = l.newer(0)
	over := sum(to) - l.replicas
	for i := range to {
		if i != l.newest {
			less := max(0, l.spec[i]-l.status[i])
			to[i] -= less
			over -= less
		}
	}
	for i := range to {
		if less := min(to[i], over); i != l.newest && less > 0 {
			to[i] = l.spec[i] - less // not from the value it was just scaled to; the next reconcile does that
			over -= less
		}
	}
	return to
}

// rollingUpdate makes new Machines while there is room, and removes old ones while enough Machines
// are available.
func (l *plan) rollingUpdate() [maxSets]int {
	to := l.spec
	to[l.newest] = l.newer(surge)
	spare := sum(l.spec) - l.replicas - max(0, l.spec[l.newest]-l.available[l.newest])
	for i := range to {
		spare -= max(0, l.status[i]-min(l.spec[i], to[i]))
	}
	available := sum(l.available)
	for _, unavailableOnly := range []bool{true, false} {
		for i := range to {
			if i == l.newest {
				continue
			}
			less := min(to[i], spare)
			if unavailableOnly {
				less = min(less, to[i]-l.available[i])
			}
			less = l.affordable(i, to[i], max(0, less), &available)
			to[i] -= less
			spare -= less
		}
	}
	if to == l.spec {
		l.breakDeadlock(&to)
	}
	return to
}

// affordable returns how many of the replicas an old MachineSet can lose while enough Machines
// remain, assuming that its available ones go first.
func (l *plan) affordable(set, replicas, less int, available *int) int {
	going := max(0, l.status[set]-(replicas-less))
	if less == 0 || l.available[set] == 0 || going == 0 {
		return less
	}
	if can := max(0, *available-l.replicas); can < going {
		left := min(l.status[set]-can, replicas)
		less, going = max(0, replicas-left), max(0, l.status[set]-left)
	}
	*available -= min(l.available[set], going)
	return less
}

// breakDeadlock removes a replica of an old MachineSet whose Machines are not all available, if
// nothing else is in progress.
func (l *plan) breakDeadlock(to *[maxSets]int) {
	if l.spec != l.status || l.available[l.newest] != l.status[l.newest] {
		return
	}
	for i := range to {
		if i != l.newest && l.available[i] != l.status[i] && l.spec[i] > 0 {
			to[i]--
			return
		}
	}
}

func sum(list [maxSets]int) int {
	n := 0
	for _, x := range list {
		n += x
	}
	return n
}
