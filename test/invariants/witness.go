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
	toolscache "k8s.io/client-go/tools/cache"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Asker is who caused a Machine's deletion.
type Asker int

// The askers.
const (
	// ClusterAPI: Cluster API deleted it by itself, to match the number of replicas.
	ClusterAPI Asker = iota
	// Agent: an agent deleted exactly this Machine.
	Agent
	// Person: a user deleted it, or did something that made Cluster API delete it.
	Person
)

// Judge provides knowledge that the API servers do not have.
type Judge interface {
	// AskedBy returns who caused the deletion of a Machine. It is called once per Machine, when its
	// deletion is seen.
	AskedBy(m *clusterv1.Machine) Asker
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

// Witness watches all changes of Machines and claims through its own connection, and detects what
// must never happen, not even briefly: two Machines with one claim, two claims with one Machine,
// and the deletion of a Machine that was not released. Its methods are safe for concurrent use.
type Witness struct {
	judge  Judge
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
	name   string
	claim  string // the label as last seen
	judged bool
}

// Watch starts to watch one namespace and returns once the existing objects have been seen. The
// context only bounds that; [Witness.Stop] ends the watching. hub must read without a cache.
func Watch(
	ctx context.Context, config *rest.Config, hub client.Reader, scheme *runtime.Scheme, namespace string, judge Judge,
) (*Witness, error) {
	w := &Witness{
		judge: judge, hub: hub, machines: map[types.UID]*machineRecord{}, labelled: map[string]types.UID{},
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
	w.cancel = cancel
	w.ended.Go(func() { _ = c.Start(running) })
	err = errors.Join(follow(ctx, c, w, w.seeMachine, w.machineGone), follow(ctx, c, w, w.seeClaim, w.claimGone))
	if err != nil {
		w.Stop()
		return nil, err
	}
	return w, nil
}

// follow calls see for each object that appears or changes, and gone for each that disappears.
func follow[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c cache.Cache, w *Witness, see, gone func(P)) error {
	kind := P(new(T))
	informer, err := c.GetInformer(ctx, kind)
	if err != nil {
		return fmt.Errorf("watching %T: %w", kind, err)
	}
	call := func(f func(P)) func(any) {
		return func(object any) {
			if tombstone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
				object = tombstone.Obj
			}
			if typed, ok := object.(P); ok {
				f(typed)
				w.touch()
			}
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    call(see),
		UpdateFunc: func(_, object any) { call(see)(object) },
		DeleteFunc: call(gone),
	})
	if err != nil {
		return fmt.Errorf("watching %T: %w", kind, err)
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return fmt.Errorf("watching %T: %w", kind, ctx.Err())
	}
	return nil
}

// Stop ends the watching.
func (w *Witness) Stop() {
	w.cancel()
	w.ended.Wait()
}

// Violations returns the violations so far, oldest first.
func (w *Witness) Violations() []Violation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Violation(nil), w.violations...)
}

// Claim returns what was seen of a claim, even if it no longer exists, or nil if it never existed.
func (w *Witness) Claim(id string) *ClaimRecord {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.claims[id]; c != nil {
		record := *c
		return &record
	}
	return nil
}

// Count returns the number of claims that meet the condition.
func (w *Witness) Count(condition func(ClaimRecord) bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, c := range w.claims {
		if condition(*c) {
			n++
		}
	}
	return n
}

// Await waits until the condition is true. It evaluates the condition after each change.
func (w *Witness) Await(ctx context.Context, condition func() bool) error {
	for {
		w.mu.Lock()
		changed := w.changed
		w.mu.Unlock()
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

func (w *Witness) touch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *Witness) report(rule Rule, kind, name, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.violations = append(w.violations, Violation{
		Rule: rule, Object: kind + " " + name, Count: 1,
		Message: time.Now().UTC().Format("15:04:05.000 ") + fmt.Sprintf(format, args...),
	})
}

func (w *Witness) seeMachine(m *clusterv1.Machine) {
	w.mu.Lock()
	r := w.machines[m.UID]
	if r == nil {
		r = &machineRecord{name: m.Name}
		w.machines[m.UID] = r
	}
	before, now := r.claim, labelOf(m)
	r.claim = now
	first := types.UID("")
	if now != "" && now != before {
		first = w.labelled[now]
		if first == "" {
			w.labelled[now] = m.UID
		}
	}
	w.mu.Unlock()
	if first != "" && first != m.UID {
		w.report(OneClaimOneMachine, "Machine", m.Name, "is labelled with claim %s, which had another Machine before", now)
	}
	if before != "" && now != "" && now != before {
		w.report(OneClaimOneMachine, "Machine", m.Name, "went from claim %s to claim %s", before, now)
	}
	if !m.DeletionTimestamp.IsZero() {
		w.judgeDeletion(r, m)
	}
}

func (w *Witness) machineGone(m *clusterv1.Machine) {
	w.mu.Lock()
	r := w.machines[m.UID]
	w.mu.Unlock()
	if r != nil {
		w.judgeDeletion(r, m)
	}
}

// judgeDeletion is only called by the informer of Machines, one call at a time.
func (w *Witness) judgeDeletion(r *machineRecord, m *clusterv1.Machine) {
	if r.judged {
		return
	}
	r.judged = true
	id := labelOf(m)
	switch w.judge.AskedBy(m) {
	case Person:
	case ClusterAPI:
		w.report(NothingTaken, "Machine", m.Name, "was deleted by Cluster API without a request (claim %q)", id)
	case Agent:
		switch {
		case id == "" && w.judge.Owns(m):
			w.report(NothingTaken, "Machine", m.Name, "was deleted by an agent and is a person's own")
		case id != "" && !w.judge.Released(id) && !w.failed(m.Namespace, m.Spec.ClusterName, id):
			w.report(NothingTaken, "Machine", m.Name, "was deleted by an agent, and its claim %s is not released", id)
		}
	}
}

// failed reports whether the agent has marked the claim as failed.
func (w *Witness) failed(namespace, cluster, id string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var c agentv1.MachineClaim
	err := w.hub.Get(ctx, client.ObjectKey{Namespace: namespace, Name: agentv1.ObjectName(cluster, id)}, &c)
	return err == nil && c.Status.FailedAt != nil
}

func (w *Witness) seeClaim(c *agentv1.MachineClaim) {
	w.mu.Lock()
	r := w.claims[c.Spec.ClaimID]
	if r == nil {
		r = &ClaimRecord{ID: c.Spec.ClaimID, Holder: c.Spec.Holder}
		w.claims[c.Spec.ClaimID] = r
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
		for id, o := range w.claims {
			if id != r.ID && o.Phase == agentv1.PhaseBound && o.Machine.UID == r.Machine.UID {
				other = id
			}
		}
	}
	w.mu.Unlock()
	if before.UID != "" && c.Status.Machine != nil && c.Status.Machine.UID != before.UID {
		w.report(OneClaimOneMachine, "MachineClaim", c.Name, "had Machine %s and has Machine %s", before.Name, c.Status.Machine.Name)
	}
	if other != "" {
		w.report(OneClaimOneMachine, "MachineClaim", c.Name, "has Machine %s, and so has claim %s", c.Status.Machine.Name, other)
	}
}

func (w *Witness) claimGone(c *agentv1.MachineClaim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.claims[c.Spec.ClaimID]; r != nil {
		r.Phase = agentv1.PhaseEnded
	}
}
