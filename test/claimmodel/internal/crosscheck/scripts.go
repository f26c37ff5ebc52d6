package crosscheck

import "github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/engine"

type (
	write = engine.Write
	// phase is a sequence of writes without a pause, after which the controllers come to rest.
	phase = []write
)

func replicas(n int) write        { return write{Verb: engine.SetReplicas, N: n} }
func unpauseWith(n int) write     { return write{Verb: engine.UnpauseWith, N: n} }
func lowerSet(n int) write        { return write{Verb: engine.LowerSet, N: n} }
func mark(m int) write            { return write{Verb: engine.Mark, N: m} }
func addFinalizer(m int) write    { return write{Verb: engine.AddFinalizer, N: m} }
func remove(m int) write          { return write{Verb: engine.Delete, N: m} }
func removeFinalizer(m int) write { return write{Verb: engine.RemoveFinalizer, N: m} }

var (
	rollout = write{Verb: engine.ChangeTemplate}
	pause   = write{Verb: engine.Pause}
	unpause = write{Verb: engine.Unpause}
	noBoot  = write{Verb: engine.KeepFromBooting}

	pauseOldest   = write{Verb: engine.PauseSet}
	unpauseOldest = write{Verb: engine.UnpauseSet}
)

// Scripts returns all scripts. MachineSets and Machines are counted from 0, oldest first.
func Scripts() []engine.Script {
	return []engine.Script{
		{Name: "a marked Machine goes", Machines: []int{3}, Phases: []phase{{mark(1)}, {replicas(2)}}},
		{Name: "marked and lowered at once", Machines: []int{3}, Phases: []phase{{mark(1), replicas(2)}}},
		{Name: "one that is deleted already takes the place of a marked one", Machines: []int{3}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {mark(1)}, {replicas(2)}, {removeFinalizer(0)},
		}},

		{Name: "released as the agent does it", Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(1)}, {removeFinalizer(0)},
		}},
		{Name: "let go before it is lowered", Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {removeFinalizer(0)}, {replicas(1)},
		}},
		{Name: "lowered and released at once", Machines: []int{2}, Phases: []phase{{addFinalizer(0), remove(0)}, {replicas(1), removeFinalizer(0)}}},
		{Name: "deleted and lowered at once", Machines: []int{2}, Phases: []phase{{addFinalizer(0), remove(0), replicas(1)}, {removeFinalizer(0)}}},
		{Name: "deleted plainly and lowered at once", Machines: []int{2}, Phases: []phase{{remove(0), replicas(1)}}},
		{Name: "raised while a deletion is held", Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(3)}, {replicas(2)}, {removeFinalizer(0)},
		}},
		{Name: "raised after it was lowered, while the deletion is held", Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(1)}, {replicas(2)}, {removeFinalizer(0)},
		}},
		{Name: "lowered to nothing while two are held", Machines: []int{3}, Phases: []phase{
			{addFinalizer(0), remove(0), addFinalizer(2), remove(2)}, {replicas(1)}, {removeFinalizer(2)}, {replicas(0)}, {removeFinalizer(0)},
		}},

		{Name: "the oldest MachineSets are charged", Machines: []int{2, 1, 1}, Phases: []phase{{replicas(2)}, {replicas(1)}}},
		{Name: "the newest is cut to the replicas first", Machines: []int{1, 1, 3}, Phases: []phase{{replicas(2)}}},
		{Name: "a release without a pause charges another MachineSet", Machines: []int{1, 1}, Phases: []phase{
			{addFinalizer(1), remove(1)}, {replicas(1)}, {removeFinalizer(1)},
		}},
		{Name: "a release under pause", Machines: []int{1, 1}, Phases: []phase{
			{addFinalizer(1), remove(1)}, {pause}, {lowerSet(1)}, {unpauseWith(1)}, {removeFinalizer(1)},
		}},
		{Name: "a release from the middle under pause", Machines: []int{1, 1, 1}, Phases: []phase{
			{addFinalizer(1), remove(1)}, {pause}, {lowerSet(1)}, {unpauseWith(2)}, {removeFinalizer(1)},
		}},
		{Name: "the paused step in one go", Machines: []int{1, 1}, Phases: []phase{
			{addFinalizer(1), remove(1)}, {pause, lowerSet(1), unpauseWith(1)}, {removeFinalizer(1)},
		}},
		{Name: "un-paused without having been lowered", Machines: []int{1, 1}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {pause}, {lowerSet(0)}, {unpause},
		}},
		{Name: "one of an older template is deleted and replaced", Machines: []int{2, 1}, Phases: []phase{
			{remove(0)}, {replicas(2)},
		}},
		{Name: "one of an older template is deleted, and replicas lowered", Machines: []int{2, 1}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(2)}, {removeFinalizer(0)},
		}},
		{Name: "one of an older template is held, lowered and raised", Machines: []int{1, 1}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(1)}, {replicas(2)}, {removeFinalizer(0)},
		}},
		{Name: "one of an older template goes while two are lowered", Machines: []int{2, 2}, Phases: []phase{{remove(1), replicas(2)}}},

		{Name: "a paused MachineSet stays so", Machines: []int{3}, Phases: []phase{
			{pauseOldest}, {replicas(2)}, {addFinalizer(1), remove(1)}, {unpauseOldest}, {removeFinalizer(1)},
		}},
		{Name: "a paused MachineSet stays so through a change of the template", Machines: []int{2}, Phases: []phase{
			{pauseOldest}, {rollout}, {replicas(3)}, {remove(0)},
		}},
		{Name: "raised while the paused MachineSet has more than its replicas", Machines: []int{2}, Phases: []phase{
			{pauseOldest}, {replicas(1)}, {replicas(2)}, {unpauseOldest},
		}},
		{Name: "raised with another template while the paused MachineSet has more than its replicas", Machines: []int{2}, Phases: []phase{
			{pauseOldest}, {replicas(1)}, {replicas(2), rollout}, {unpauseOldest},
		}},
		{Name: "lowered while the MachineDeployment is paused", Machines: []int{2}, Phases: []phase{
			{pause}, {replicas(1), remove(0)}, {unpause},
		}},

		{Name: "the template changes while Machines are made", Machines: []int{1}, Phases: []phase{{replicas(3), rollout}}},
		{Name: "the template changes while Machines cannot boot", Machines: []int{1}, Phases: []phase{
			{noBoot}, {replicas(2)}, {rollout}, {replicas(3)}, {replicas(2)}, {replicas(1)},
		}},
		{Name: "Machines that cannot boot go first", Machines: []int{2}, Phases: []phase{
			{noBoot}, {replicas(4)}, {replicas(3)}, {mark(0)}, {replicas(2)},
		}},
		{Name: "Machines that cannot boot, and a held one", Machines: []int{2}, Phases: []phase{
			{noBoot}, {addFinalizer(0), remove(0)}, {replicas(3)}, {replicas(2)}, {removeFinalizer(0)},
		}},

		{Name: "a rollout", RollingUpdate: true, Machines: []int{2}, Phases: []phase{{rollout}, {replicas(1)}}},
		{Name: "a rollout with a held deletion", RollingUpdate: true, Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {rollout}, {removeFinalizer(0)},
		}},
		{Name: "a rollout with a held deletion, lowered", RollingUpdate: true, Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {rollout}, {replicas(1)}, {removeFinalizer(0)},
		}},
		{Name: "released before a rollout", RollingUpdate: true, Machines: []int{2}, Phases: []phase{
			{addFinalizer(0), remove(0)}, {replicas(1), rollout}, {removeFinalizer(0)},
		}},
		{Name: "a rollout of a paused MachineSet with a held deletion", RollingUpdate: true, Machines: []int{3}, Phases: []phase{
			{addFinalizer(1), remove(1), addFinalizer(2), remove(2)},
			{pauseOldest},
			{replicas(2), rollout},
			{replicas(1)},
			{unpauseOldest},
			{removeFinalizer(1), removeFinalizer(2)},
		}},
		{Name: "a rollout whose Machines cannot boot", RollingUpdate: true, Machines: []int{2}, Phases: []phase{
			{noBoot}, {rollout}, {replicas(1)},
		}},
	}
}
