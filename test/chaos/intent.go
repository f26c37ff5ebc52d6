package chaos

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/invariants"
)

// intent records the actions of everyone who acts on the hub besides Cluster API, and the resulting
// ownership. The agents' accounting is compared with it. It is safe for concurrent use.
type intent struct {
	holders *holders

	mu      sync.Mutex
	spoke   client.Reader
	shares  map[string]invariants.Share // by node group
	own     map[types.UID]string        // Machines made for the users' own replicas, with their group
	deleted map[types.UID]bool          // Machines that a user deleted, or caused to be deleted
	asked   map[types.UID]bool          // Machines that an agent asked the API server to delete
	lowered map[string]int              // by node group: Machines that Cluster API may choose because a user lowered replicas
	torn    map[string]bool             // node groups that a user deleted
	wrote   map[string]int32            // by node group: the replicas that a user wrote last
}

// repeats reports whether a user wrote the same number last. Repeated writes of one number look
// like a tool's, for which the agent freezes a group.
func (i *intent) repeats(group string, replicas int32) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	last, wrote := i.wrote[group]
	return wrote && last == replicas
}

func newIntent(holders *holders) *intent {
	return &intent{
		holders: holders, shares: map[string]invariants.Share{}, own: map[types.UID]string{}, deleted: map[types.UID]bool{},
		asked: map[types.UID]bool{}, lowered: map[string]int{}, torn: map[string]bool{},
		wrote: map[string]int32{},
	}
}

func (i *intent) update(change func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	change()
}

// share changes the number of machines that a group's user owns.
func (i *intent) share(group string, own, unclear int32) {
	i.update(func() {
		s := i.shares[group]
		s.Own, s.Unclear = max(0, s.Own+own), s.Unclear+unclear
		i.shares[group] = s
	})
}

// disown forgets which Machines of a group are the user's: the user no longer owns as many as were
// made for the user's replicas.
func (i *intent) disown(group string) {
	i.update(func() {
		for uid, of := range i.own {
			if of == group {
				delete(i.own, uid)
			}
		}
	})
}

// expected returns the expected state at rest.
func (i *intent) expected() invariants.Expected {
	e := invariants.Expected{Shares: map[string]invariants.Share{}, Wanted: i.holders.wanted(), Holder: holder}
	i.update(func() { maps.Copy(e.Shares, i.shares) })
	return e
}

// DeletedBy implements [invariants.Intent].
func (i *intent) DeletedBy(m *clusterv1.Machine) invariants.Actor {
	i.mu.Lock()
	defer i.mu.Unlock()
	group := m.Labels[clusterv1.MachineDeploymentNameLabel]
	switch {
	case i.torn[group], i.deleted[m.UID]:
		return invariants.Person
	case i.asked[m.UID]:
		return invariants.Agent
	case i.lowered[group] > 0:
		i.lowered[group]--
		return invariants.Person
	}
	return invariants.ClusterAPI
}

// Released implements [invariants.Intent].
func (i *intent) Released(claimID string) bool {
	if wanted, known := i.holders.wants(claimID); known {
		return !wanted
	}
	// A NodeClaim's claim: Karpenter gives it up by deleting the NodeClaim.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	i.mu.Lock()
	spoke := i.spoke
	i.mu.Unlock()
	var list karpenterv1.NodeClaimList
	if err := spoke.List(ctx, &list); err != nil {
		return false
	}
	for i := range list.Items {
		if string(list.Items[i].UID) == claimID {
			return !list.Items[i].DeletionTimestamp.IsZero()
		}
	}
	return true
}

// Owns implements [invariants.Intent].
func (i *intent) Owns(m *clusterv1.Machine) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.own[m.UID] != ""
}
