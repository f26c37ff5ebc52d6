// Package unclaimed finds the Machines of NodeClaims that never had a claim, such as those that
// another Cluster API provider left in a workload cluster.
//
// When such a NodeClaim ends, nothing is released: its Machine would keep running and costing
// money, without a trace of it in this cluster. Code that ends NodeClaims therefore consults this
// package first, and code that adopts Machines uses it to find them.
package unclaimed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	nodeutils "sigs.k8s.io/karpenter/pkg/utils/node"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// freshFor is how long a listing of Machines is reused: core asks for each NodeClaim every few
// seconds.
const freshFor = 5 * time.Second

// Claims is a mirror of the shim's claims.
type Claims interface {
	Get(claimID string) (*agentv1alpha1.Claim, bool)
}

// Finder finds Machines without a claim. It is safe for concurrent use.
type Finder struct {
	clock   clock.PassiveClock
	kube    client.Reader
	agent   *agentclient.Client
	claims  Claims
	cluster *agentv1alpha1.ClusterRef
	timeout time.Duration
	calls   singleflight.Group

	mu       sync.Mutex
	machines []*agentv1alpha1.Machine
	readAt   time.Time
	groups   map[string]string // node groups of Machines seen since the process began, by provider ID; see [Finder.forget]
}

// New returns a Finder. kube reads NodeClaims from a cache. timeout bounds each call to the agent.
func New(
	clk clock.PassiveClock, kube client.Reader, agent *agentclient.Client, claims Claims, cluster *agentv1alpha1.ClusterRef, timeout time.Duration,
) *Finder {
	return &Finder{clock: clk, kube: kube, agent: agent, claims: claims, cluster: cluster, timeout: timeout, groups: map[string]string{}}
}

// All returns the Machines of the Cluster that have a provider ID, claimed or not. The list may be
// up to freshFor old. It is complete, or an error is returned.
func (f *Finder) All(ctx context.Context) ([]*agentv1alpha1.Machine, error) {
	machines, err := f.recent(ctx)
	return lo.Filter(machines, func(m *agentv1alpha1.Machine, _ int) bool { return m.GetProviderId() != "" }), err
}

// Machines returns those of [Finder.All] that have no claim.
func (f *Finder) Machines(ctx context.Context) ([]*agentv1alpha1.Machine, error) {
	machines, err := f.All(ctx)
	return lo.Filter(machines, func(m *agentv1alpha1.Machine, _ int) bool { return !isClaimed(m) }), err
}

// Named returns the unclaimed Machine with the name, or nil.
func (f *Finder) Named(ctx context.Context, name string) (*agentv1alpha1.Machine, error) {
	return f.find(ctx, func(m *agentv1alpha1.Machine) bool { return m.GetName() == name && !isClaimed(m) })
}

// With returns the unclaimed Machine with the provider ID, or nil.
func (f *Finder) With(ctx context.Context, providerID string) (*agentv1alpha1.Machine, error) {
	return f.find(ctx, func(m *agentv1alpha1.Machine) bool { return m.GetProviderId() == providerID && !isClaimed(m) })
}

// Any returns the Machine with the provider ID, claimed or not, or nil.
func (f *Finder) Any(ctx context.Context, providerID string) (*agentv1alpha1.Machine, error) {
	return f.find(ctx, func(m *agentv1alpha1.Machine) bool { return m.GetProviderId() == providerID })
}

func isClaimed(machine *agentv1alpha1.Machine) bool { return machine.GetClaimId() != "" }

func (f *Finder) find(ctx context.Context, is func(*agentv1alpha1.Machine) bool) (*agentv1alpha1.Machine, error) {
	machines, err := f.recent(ctx)
	if err != nil {
		return nil, err
	}
	machine, _ := lo.Find(machines, is)
	return machine, nil
}

// recent returns all Machines, from a listing at most freshFor old.
func (f *Finder) recent(ctx context.Context) ([]*agentv1alpha1.Machine, error) {
	f.mu.Lock()
	machines, readAt := f.machines, f.readAt
	f.mu.Unlock()
	if !readAt.IsZero() && f.clock.Since(readAt) < freshFor {
		return machines, nil
	}
	// All callers share one call, so the first caller's cancellation must not end it.
	call := f.calls.DoChan("", func() (any, error) { return f.list(context.WithoutCancel(ctx)) })
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case result := <-call:
		if result.Err != nil {
			return nil, result.Err
		}
		machines, _ = result.Val.([]*agentv1alpha1.Machine)
		return machines, nil
	}
}

func (f *Finder) list(ctx context.Context) ([]*agentv1alpha1.Machine, error) {
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	readAt := f.clock.Now()
	response, err := f.agent.Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: f.cluster})
	if err != nil {
		return nil, fmt.Errorf("listing the machines: %w", err)
	}
	machines := response.GetMachines()
	if f.add(machines, readAt) > 2*len(machines) {
		return machines, f.forget(ctx)
	}
	return machines, nil
}

// add stores a listing, and returns the number of Machines whose node groups are remembered.
func (f *Finder) add(machines []*agentv1alpha1.Machine, readAt time.Time) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.machines, f.readAt = machines, readAt
	for _, machine := range machines {
		if id := machine.GetProviderId(); id != "" {
			f.groups[id] = machine.GetNodeGroupId()
		}
	}
	return len(f.groups)
}

// forget removes the node groups of Machines that are neither in the last listing nor named by a
// NodeClaim: [Finder.Of] is only asked about NodeClaims.
func (f *Finder) forget(ctx context.Context) error {
	nodeClaims := &karpv1.NodeClaimList{}
	if err := f.kube.List(ctx, nodeClaims, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("listing the NodeClaims: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	kept := sets.New[string]()
	for _, machine := range f.machines {
		kept.Insert(machine.GetProviderId())
	}
	for i := range nodeClaims.Items {
		kept.Insert(nodeClaims.Items[i].Status.ProviderID)
	}
	maps.DeleteFunc(f.groups, func(providerID, _ string) bool { return !kept.Has(providerID) })
	return nil
}

// ErrUnknownMachine means that the agent has no claim for a NodeClaim, and reports no Machine with
// its provider ID. The Machine may still exist: the agent does not report Machines of a
// MachineDeployment without the node group label, or of another namespace or Cluster. Or the hub
// was restored from a backup from before the claim: otherwise the agent would remember that it has
// ended.
var ErrUnknownMachine = errors.New("the agent shows no machine with the provider ID of the NodeClaim, and has no claim for it")

// Of returns the Machine that the NodeClaim runs on without ever having had a claim. It returns nil
// if the NodeClaim has or had a claim that the agent knows, if another claim has the Machine, or if
// the Machine is gone. If none of this is known, the error is [ErrUnknownMachine]. If the NodeClaim
// once had a claim, the Machine counts as gone only while the NodeClaim is being deleted and its
// Node is not Ready.
func (f *Finder) Of(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*agentv1alpha1.Machine, error) {
	if f.isKnown(nodeClaim) {
		return nil, nil //nolint:nilnil // documented
	}
	callCtx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	// The mirror may lag behind, and it does not have the claims of other holders.
	response, err := f.agent.Claims.GetClaim(callCtx, &agentv1alpha1.GetClaimRequest{Cluster: f.cluster, ClaimId: string(nodeClaim.UID)})
	switch {
	case agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound:
	case err != nil:
		return nil, fmt.Errorf("getting the claim: %w", err)
	case !NeverMade(response.GetClaim()):
		return nil, nil //nolint:nilnil // documented
	}
	return f.without(ctx, nodeClaim, f.reported)
}

// UnknownAmong returns those of the NodeClaims for which [Finder.Of] returns [ErrUnknownMachine].
// It makes no call for each of them: whether a NodeClaim has or had a claim is decided by the
// mirror alone, and each node group is requested once. While the mirror lags behind, or if the
// claim is another holder's, the result may contain a NodeClaim for which Of returns nil. It lacks
// none, so it is for callers that keep what is unknown.
func (f *Finder) UnknownAmong(ctx context.Context, nodeClaims []*karpv1.NodeClaim) ([]*karpv1.NodeClaim, error) {
	groups := map[string]error{}
	reported := func(ctx context.Context, group string) error {
		err, asked := groups[group]
		if !asked {
			err = f.reported(ctx, group)
			groups[group] = err
		}
		return err
	}
	var unknown []*karpv1.NodeClaim
	for _, nodeClaim := range nodeClaims {
		if f.isKnown(nodeClaim) {
			continue
		}
		switch _, err := f.without(ctx, nodeClaim, reported); {
		case errors.Is(err, ErrUnknownMachine):
			unknown = append(unknown, nodeClaim)
		case err != nil:
			return nil, fmt.Errorf("looking for the machine of NodeClaim %s: %w", nodeClaim.Name, err)
		}
	}
	return unknown, nil
}

// isKnown reports whether a NodeClaim has no machine yet, or has or had a claim according to the
// mirror.
func (f *Finder) isKnown(nodeClaim *karpv1.NodeClaim) bool {
	if id := nodeClaim.Status.ProviderID; id == "" || placeholder.Is(id) {
		return true
	}
	claim, known := f.claims.Get(string(nodeClaim.UID))
	return known && !NeverMade(claim)
}

// without is [Finder.Of] for a NodeClaim that neither has nor had a claim.
func (f *Finder) without(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, reported func(ctx context.Context, group string) error,
) (*agentv1alpha1.Machine, error) {
	id := nodeClaim.Status.ProviderID
	machine, err := f.Any(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case machine == nil && nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation] != "":
		return nil, f.lost(ctx, nodeClaim)
	case machine == nil:
		return nil, f.gone(ctx, id, reported)
	case isClaimed(machine):
		return nil, nil //nolint:nilnil // documented
	}
	return machine, nil
}

// lost returns nil if a NodeClaim whose claim the agent does not know may end without its Machine:
// it is being deleted, and its Node is gone or not Ready. Otherwise it returns [ErrUnknownMachine].
func (f *Finder) lost(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	name := nodeClaim.Status.NodeName
	switch {
	case nodeClaim.DeletionTimestamp.IsZero():
		return ErrUnknownMachine
	case name == "":
		return nil
	}
	node := &corev1.Node{}
	err := f.kube.Get(ctx, client.ObjectKey{Name: name}, node)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("getting Node %s: %w", name, err)
	case nodeutils.GetCondition(node, corev1.NodeReady).Status == corev1.ConditionTrue:
		return ErrUnknownMachine
	}
	return nil
}

// gone returns nil if the agent still reports the node group of the Machine that had the provider
// ID, which means that the Machine is gone. Otherwise it returns [ErrUnknownMachine], or the error
// of the call.
func (f *Finder) gone(ctx context.Context, providerID string, reported func(ctx context.Context, group string) error) error {
	f.mu.Lock()
	group := f.groups[providerID]
	f.mu.Unlock()
	if group == "" {
		return ErrUnknownMachine
	}
	return reported(ctx, group)
}

// reported returns nil if the agent reports the node group, [ErrUnknownMachine] if it does not, or
// the error of the call.
func (f *Finder) reported(ctx context.Context, group string) error {
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	_, err := f.agent.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: f.cluster, Id: group})
	switch {
	case err == nil:
		return nil
	case agenterrors.IsNotFound(err):
		return ErrUnknownMachine
	}
	return fmt.Errorf("getting node group %s: %w", group, err)
}

// NeverMade reports whether a claim never existed. It is either the tombstone of a release without
// a claim, or a claim that was to adopt a Machine and was refused by the node group.
func NeverMade(claim *agentv1alpha1.Claim) bool {
	if claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return false
	}
	refused := claim.GetReason() == claimreasons.Refused || claim.GetReason() == claimreasons.NoRoom
	return claim.GetNodeGroupId() == "" || claim.GetAdoptMachine() != "" && claim.GetMachine() == nil && refused
}

// Event returns an event that names the Machine, the reason why it could not be adopted, and the
// remedy.
func (f *Finder) Event(nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine, refused error) events.Event {
	why := refused.Error()
	if answer, ok := status.FromError(refused); ok {
		why = answer.Message()
	}
	namespace := f.cluster.GetNamespace()
	message := fmt.Sprintf("Machine %s/%s in the hub, with provider ID %s, has no claim and cannot be adopted: %s. "+
		"Karpenter cannot remove the machine and keeps this NodeClaim. Remove the obstacle, or delete the Machine "+
		"(kubectl delete machine -n %s %s)", namespace, machine.GetName(), machine.GetProviderId(), strings.TrimSuffix(why, "."), namespace,
		machine.GetName())
	return events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineWithoutClaim",
		Message:        lo.Substring(message, 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID), why},
		DedupeTimeout:  10 * time.Minute,
	}
}

// Unknown returns an event that reports [ErrUnknownMachine] on the NodeClaim, with the remedy.
func (f *Finder) Unknown(nodeClaim *karpv1.NodeClaim) events.Event {
	message := fmt.Sprintf("The agent shows no Machine with provider ID %s in Cluster %s/%s, and has no claim for this NodeClaim. Karpenter keeps "+
		"it until its Machine is found. If the Machine exists, label its MachineDeployment with node.cluster.x-k8s.io/karpenter-member: it is "+
		"then adopted. If the Machine is gone or belongs to another namespace or Cluster, detach this NodeClaim from it: "+
		"kubectl annotate nodeclaim %s %s=true",
		nodeClaim.Status.ProviderID, f.cluster.GetNamespace(), f.cluster.GetName(), nodeClaim.Name, v1alpha1.ReturnMachineAnnotation)
	return events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineUnknown",
		Message:        lo.Substring(message, 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID)},
		DedupeTimeout:  10 * time.Minute,
	}
}
