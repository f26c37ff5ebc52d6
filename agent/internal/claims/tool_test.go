package claims

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// TestAToolThatKeepsReplicasIsStopped makes and releases claims while a tool sets replicas back to
// its number whenever they differ. The group is frozen at the third such write at the latest, and
// from then on the user's share does not change.
func TestAToolThatKeepsReplicasIsStopped(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const floor = 9
		w := newWorld(t, worldOptions{groups: 1, floor: floor, strategy: clusterv1.OnDeleteMachineDeploymentStrategyType})
		// Each write of the tool makes Cluster API remove Machines of its own choice. The freeze
		// must end that.
		w.fair, w.withdrawing, w.copies = true, true, true
		group := w.groups[0]
		w.licensed[group] = 1000
		round := func() {
			for e := range w.agents {
				for _, k := range allKinds {
					w.agents[e].caches[k] = w.hub.snapshot(k)
				}
				w.agentReconciles(e, group)
			}
			w.controllers(group)
			w.clock.Step(time.Duration(w.draw("minutes", 1, 3)) * time.Minute) // all rounds take less than an hour
		}
		frozen := func() bool {
			_, is := w.md(group).Annotations[v1alpha1.ReplicasLoweredAnnotation]
			return is
		}
		for range 3 {
			round()
		}
		number := int32(floor + w.draw("more", 0, 2))
		claims, restored := 0, 0
		stopped := int32(-1)
		for range 16 {
			if w.draw("release", 0, 3) == 0 && claims > 0 {
				for _, c := range w.claims() {
					if c.CurrentPhase() == v1alpha1.PhaseBound {
						c.Status.Phase, c.Status.Drained = v1alpha1.PhaseReleasing, true
						w.must(w.hub.update(c, true))
						break
					}
				}
			} else if claims < floor/2 && !frozen() {
				claims++
				w.must(w.hub.create(w.agents[0].engine.newClaim(Request{
					Namespace: namespace, Cluster: clusterName, ID: fmt.Sprintf("c%d", claims), Holder: holder, DisplayName: "nc", Candidates: w.groups,
				}, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: clusterName}}, group)))
			}
			round()
			if frozen() {
				if stopped < 0 {
					stopped = w.ledger(group).Floor
				}
				if now := w.ledger(group).Floor; now != stopped {
					w.t.Fatalf("the floor was %d when the group was frozen, and is %d\n%s", stopped, now, w.describe())
				}
			}
			if md := w.md(group); *md.Spec.Replicas != number {
				if restored++; restored > 3 && !frozen() {
					w.t.Fatalf("the tool has written %d replicas %d times, and the group is not frozen\n%s", number, restored, w.describe())
				}
				md.Spec.Replicas = &number
				w.must(w.hub.update(md, false))
			}
		}
	})
}
