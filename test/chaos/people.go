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

// people records the actions of everyone who acts on the hub besides Cluster API, and the resulting
// ownership. The agents' accounting is compared with it. It is safe for concurrent use.
type people struct {
	calls *callers

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
func (p *people) repeats(group string, replicas int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, wrote := p.wrote[group]
	return wrote && last == replicas
}

func newPeople(calls *callers) *people {
	return &people{
		calls: calls, shares: map[string]invariants.Share{}, own: map[types.UID]string{}, deleted: map[types.UID]bool{},
		asked: map[types.UID]bool{}, lowered: map[string]int{}, torn: map[string]bool{},
		wrote: map[string]int32{},
	}
}

func (p *people) update(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// share changes the number of machines that a group's user owns.
func (p *people) share(group string, own, unclear int32) {
	p.update(func() {
		s := p.shares[group]
		s.Own, s.Unclear = max(0, s.Own+own), s.Unclear+unclear
		p.shares[group] = s
	})
}

// disown forgets which Machines of a group are the user's: the user no longer owns as many as were
// made for the user's replicas.
func (p *people) disown(group string) {
	p.update(func() {
		for uid, of := range p.own {
			if of == group {
				delete(p.own, uid)
			}
		}
	})
}

// expected returns the expected state at rest.
func (p *people) expected() invariants.Expected {
	e := invariants.Expected{Shares: map[string]invariants.Share{}, Wanted: p.calls.wanted(), Holder: holder}
	p.update(func() { maps.Copy(e.Shares, p.shares) })
	return e
}

// AskedBy implements [invariants.Judge].
func (p *people) AskedBy(m *clusterv1.Machine) invariants.Asker {
	p.mu.Lock()
	defer p.mu.Unlock()
	group := m.Labels[clusterv1.MachineDeploymentNameLabel]
	switch {
	case p.torn[group], p.deleted[m.UID]:
		return invariants.Person
	case p.asked[m.UID]:
		return invariants.Agent
	case p.lowered[group] > 0:
		p.lowered[group]--
		return invariants.Person
	}
	return invariants.ClusterAPI
}

// Released implements [invariants.Judge].
func (p *people) Released(claimID string) bool {
	if wanted, known := p.calls.wants(claimID); known {
		return !wanted
	}
	// A NodeClaim's claim: Karpenter gives it up by deleting the NodeClaim.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	p.mu.Lock()
	spoke := p.spoke
	p.mu.Unlock()
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

// Owns implements [invariants.Judge].
func (p *people) Owns(m *clusterv1.Machine) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.own[m.UID] != ""
}
