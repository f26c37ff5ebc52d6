package invariants

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/informers"
)

// Actor is who caused a Machine's deletion.
type Actor int

// The actors.
const (
	// ClusterAPI: Cluster API deleted it by itself, to match the number of replicas.
	ClusterAPI Actor = iota
	// Agent: an agent deleted exactly this Machine.
	Agent
	// Person: a user deleted it, or did something that made Cluster API delete it.
	Person
)

// Intent provides knowledge that the API servers do not have.
type Intent interface {
	// DeletedBy returns who caused the deletion of a Machine. It is called once per Machine, when
	// its deletion is seen.
	DeletedBy(m *clusterv1.Machine) Actor
	// Released reports whether the holder of the claim has released it, or its owner is gone. It
	// need not know about claims that the agent may give up by itself because they failed.
	Released(claimID string) bool
	// Owns reports whether the unclaimed Machine is known to be a user's own.
	Owns(m *clusterv1.Machine) bool
}

// ClaimRecord is what was seen of one claim.
type ClaimRecord struct {
	ID, Holder, Group string
	// Phase, Reason and Machine are the last ones seen.
	Phase   agentv1.Phase
	Reason  string
	Machine agentv1.MachineReference
	// Entered is set if the claim was admitted by a node group.
	Entered bool
	// Releasing is set if its release was begun.
	Releasing bool
}

// Auditor watches all changes of Machines and claims through its own connection, and detects what
// must never happen, not even briefly: two Machines with one claim, two claims with one Machine,
// and the deletion of a Machine that was not released. Its methods are safe for concurrent use.
type Auditor struct {
	intent Intent
	hub    client.Reader
	cancel context.CancelFunc
	ended  sync.WaitGroup

	mu         sync.Mutex
	violations []Violation
	machines   map[types.UID]*machineRecord
	labelled   map[string]types.UID // by claim: the only Machine that it may ever have
	claims     map[string]*ClaimRecord
	changed    chan struct{} // closed and replaced at each change
}

type machineRecord struct {
	name    string
	claim   string // the label as last seen
	audited bool
}

// Watch starts to watch one namespace and returns once the existing objects have been seen. The
// context only bounds that; [Auditor.Stop] ends the watching. hub must read without a cache.
func Watch(
	ctx context.Context, config *rest.Config, hub client.Reader, scheme *runtime.Scheme, namespace string, intent Intent,
) (*Auditor, error) {
	a := &Auditor{
		intent: intent, hub: hub, machines: map[types.UID]*machineRecord{}, labelled: map[string]types.UID{},
		claims: map[string]*ClaimRecord{}, changed: make(chan struct{}),
	}
	c, err := cache.New(config, cache.Options{
		Scheme: scheme, DefaultTransform: cache.TransformStripManagedFields(),
		DefaultNamespaces: map[string]cache.Config{namespace: {}},
	})
	if err != nil {
		return nil, fmt.Errorf("watching the hub: %w", err)
	}
	running, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	a.ended.Go(func() { _ = c.Start(running) })
	err = errors.Join(
		informers.Follow(ctx, c, &clusterv1.Machine{}, telling(a, a.seeMachine), telling(a, a.machineGone)),
		informers.Follow(ctx, c, &agentv1.MachineClaim{}, telling(a, a.seeClaim), telling(a, a.claimGone)),
	)
	if err != nil {
		a.Stop()
		return nil, err
	}
	return a, nil
}

// telling returns see, after which those who wait for a change look again.
func telling[T any](a *Auditor, see func(T)) func(T) {
	return func(object T) {
		see(object)
		a.touch()
	}
}

// Stop ends the watching.
func (a *Auditor) Stop() {
	a.cancel()
	a.ended.Wait()
}

// Violations returns the violations so far, oldest first.
func (a *Auditor) Violations() []Violation {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]Violation(nil), a.violations...)
}

// Claim returns what was seen of a claim, even if it no longer exists, or nil if it never existed.
func (a *Auditor) Claim(id string) *ClaimRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.claims[id]; c != nil {
		record := *c
		return &record
	}
	return nil
}

// Count returns the number of claims that meet the condition.
func (a *Auditor) Count(condition func(ClaimRecord) bool) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, c := range a.claims {
		if condition(*c) {
			n++
		}
	}
	return n
}

// Await waits until the condition is true. It evaluates the condition after each change.
func (a *Auditor) Await(ctx context.Context, condition func() bool) error {
	for {
		a.mu.Lock()
		changed := a.changed
		a.mu.Unlock()
		if condition() {
			return nil
		}
		select {
		case <-changed:
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (a *Auditor) touch() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *Auditor) report(rule Rule, kind, name, format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.violations = append(a.violations, Violation{
		Rule: rule, Object: kind + " " + name, Count: 1,
		Message: time.Now().UTC().Format("15:04:05.000 ") + fmt.Sprintf(format, args...),
	})
}

func (a *Auditor) seeMachine(m *clusterv1.Machine) {
	a.mu.Lock()
	r := a.machines[m.UID]
	if r == nil {
		r = &machineRecord{name: m.Name}
		a.machines[m.UID] = r
	}
	before, now := r.claim, labelOf(m)
	r.claim = now
	first := types.UID("")
	if now != "" && now != before {
		first = a.labelled[now]
		if first == "" {
			a.labelled[now] = m.UID
		}
	}
	a.mu.Unlock()
	if first != "" && first != m.UID {
		a.report(OneClaimOneMachine, "Machine", m.Name, "is labelled with claim %s, which had another Machine before", now)
	}
	if before != "" && now != "" && now != before {
		a.report(OneClaimOneMachine, "Machine", m.Name, "went from claim %s to claim %s", before, now)
	}
	if !m.DeletionTimestamp.IsZero() {
		a.auditDeletion(r, m)
	}
}

func (a *Auditor) machineGone(m *clusterv1.Machine) {
	a.mu.Lock()
	r := a.machines[m.UID]
	a.mu.Unlock()
	if r != nil {
		a.auditDeletion(r, m)
	}
}

// auditDeletion is only called by the informer of Machines, one call at a time.
func (a *Auditor) auditDeletion(r *machineRecord, m *clusterv1.Machine) {
	if r.audited {
		return
	}
	r.audited = true
	id := labelOf(m)
	switch a.intent.DeletedBy(m) {
	case Person:
	case ClusterAPI:
		a.report(NothingTaken, "Machine", m.Name, "was deleted by Cluster API without a request (claim %q)", id)
	case Agent:
		switch {
		case id == "" && a.intent.Owns(m):
			a.report(NothingTaken, "Machine", m.Name, "was deleted by an agent and is a person's own")
		case id != "" && !a.intent.Released(id) && !a.failed(m.Namespace, m.Spec.ClusterName, id):
			a.report(NothingTaken, "Machine", m.Name, "was deleted by an agent, and its claim %s is not released", id)
		}
	}
}

// failed reports whether the agent has marked the claim as failed.
func (a *Auditor) failed(namespace, cluster, id string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var c agentv1.MachineClaim
	err := a.hub.Get(ctx, client.ObjectKey{Namespace: namespace, Name: agentv1.ObjectName(cluster, id)}, &c)
	return err == nil && c.Status.FailedAt != nil
}

func (a *Auditor) seeClaim(c *agentv1.MachineClaim) {
	a.mu.Lock()
	r := a.claims[c.Spec.ClaimID]
	if r == nil {
		r = &ClaimRecord{ID: c.Spec.ClaimID, Holder: c.Spec.Holder}
		a.claims[c.Spec.ClaimID] = r
	}
	before := r.Machine
	r.Group, r.Phase, r.Reason = c.Spec.NodeGroup, c.CurrentPhase(), c.Status.Reason
	r.Entered = r.Entered || c.Status.Phase == agentv1.PhasePending || c.Status.Machine != nil
	r.Releasing = r.Releasing || c.Status.ReleasedAt != nil
	if c.Status.Machine != nil {
		r.Machine = *c.Status.Machine
	}
	other := ""
	if r.Phase == agentv1.PhaseBound && before.UID != r.Machine.UID {
		for id, o := range a.claims {
			if id != r.ID && o.Phase == agentv1.PhaseBound && o.Machine.UID == r.Machine.UID {
				other = id
			}
		}
	}
	a.mu.Unlock()
	if before.UID != "" && c.Status.Machine != nil && c.Status.Machine.UID != before.UID {
		a.report(OneClaimOneMachine, "MachineClaim", c.Name, "had Machine %s and has Machine %s", before.Name, c.Status.Machine.Name)
	}
	if other != "" {
		a.report(OneClaimOneMachine, "MachineClaim", c.Name, "has Machine %s, and so has claim %s", c.Status.Machine.Name, other)
	}
}

func (a *Auditor) claimGone(c *agentv1.MachineClaim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.claims[c.Spec.ClaimID]; r != nil {
		r.Phase = agentv1.PhaseEnded
	}
}
