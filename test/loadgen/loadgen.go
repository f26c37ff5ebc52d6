// Package loadgen requests many machines at once from a sandbox's agent and watches the hub
// meanwhile. The tests of cost and the benchmarks share it.
package loadgen

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/informers"
	"github.com/karpenter-capi/karpenter-capi/test/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// Holder is the holder of this package's claims. Only an administrator may act as it.
const Holder = "loadgen"

// callTimeout bounds one call. It exceeds the timeout of any caller in the product, because the
// machine may be busy.
const callTimeout = time.Minute

// Env is a sandbox with an agent that only this package calls. Its methods are safe for concurrent
// use.
type Env struct {
	Sandbox *sandbox.Sandbox
	// Hub is an administrator's client, without a cache.
	Hub      client.Client
	Agent    *agentclient.Client
	machines *machines
}

// Start starts a sandbox without a shim. The context only bounds the start; [Env.Stop] ends it.
func Start(ctx context.Context, options sandbox.Options) (*Env, error) {
	options.WithoutShim = true
	box, err := sandbox.Start(ctx, options)
	if err != nil {
		return nil, err
	}
	s := &Env{Sandbox: box}
	if err := s.connect(ctx); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

func (s *Env) connect(ctx context.Context) error {
	config := s.Sandbox.HubConfig()
	config.QPS, config.Burst = 1000, 1000
	var err error
	if s.Hub, err = client.New(config, client.Options{Scheme: testenv.Scheme()}); err != nil {
		return err
	}
	state := s.Sandbox.State()
	s.Agent, err = agentclient.New(agentclient.Options{
		Address: state.AgentAddress, Timeout: callTimeout,
		TLS: &agentclient.TLS{CertFile: state.Paths.AdminCertificate, KeyFile: state.Paths.AdminKey, CAFile: state.Paths.AgentCA},
	})
	if err != nil {
		return err
	}
	s.machines, err = watchMachines(ctx, config)
	return err
}

// Stop stops everything.
func (s *Env) Stop() {
	if s.machines != nil {
		s.machines.stop()
	}
	if s.Agent != nil {
		_ = s.Agent.Close() // no calls are in flight
	}
	s.Sandbox.Stop()
}

// CreateCluster creates another Cluster in the hub, as for another tenant, and waits until Cluster
// API has connected to it. It shares the control plane of the sandbox's own Cluster, so it is only
// for node groups whose Machines are held.
func (s *Env) CreateCluster(ctx context.Context, name string) error {
	var plane simv1.SimControlPlane
	var secret corev1.Secret
	if err := errors.Join(
		s.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}, &plane),
		s.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName + "-kubeconfig"}, &secret),
	); err != nil {
		return fmt.Errorf("reading how the Cluster %s is reached: %w", sandbox.ClusterName, err)
	}
	meta := func(name, cluster string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: sandbox.ClusterNamespace, Name: name, Labels: map[string]string{clusterv1.ClusterNameLabel: cluster},
		}
	}
	reference := func(kind string) clusterv1.ContractVersionedObjectReference {
		return clusterv1.ContractVersionedObjectReference{APIGroup: simv1.GroupVersion.Group, Kind: kind, Name: name}
	}
	cluster := &clusterv1.Cluster{
		ObjectMeta: meta(name, name),
		Spec:       clusterv1.ClusterSpec{InfrastructureRef: reference("SimCluster"), ControlPlaneRef: reference("SimControlPlane")},
	}
	for _, object := range []client.Object{
		&corev1.Secret{ObjectMeta: meta(name+"-kubeconfig", name), Type: secret.Type, Data: secret.Data},
		&simv1.SimCluster{ObjectMeta: meta(name, name)},
		&simv1.SimControlPlane{ObjectMeta: meta(name, name), Spec: plane.Spec},
		cluster,
	} {
		if err := s.Hub.Create(ctx, object); err != nil {
			return fmt.Errorf("creating %T %s: %w", object, object.GetName(), err)
		}
	}
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		err := s.Hub.Get(ctx, client.ObjectKeyFromObject(cluster), cluster)
		connected := apimeta.IsStatusConditionTrue(cluster.Status.Conditions, clusterv1.ClusterRemoteConnectionProbeCondition)
		return lo.Ternary(connected, "", "Cluster API to connect to the Cluster "+name), err
	})
}

// Group describes a node group to create.
type Group struct {
	Name string
	// Cluster is the name of its Cluster. Empty means the sandbox's own.
	Cluster string
	// Max is its max size. Zero means none.
	Max int
	// Boot, Join and Termination are the delays of the infrastructure.
	Boot, Join, Termination time.Duration
	// Held keeps every machine from booting until [Env.Unhold].
	Held bool
}

// CreateGroup creates a node group without machines and waits until the agent knows it.
func (s *Env) CreateGroup(ctx context.Context, g Group) error {
	delay := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	template := nodegroup.Template(g.Name)
	machine := &template.Spec.Template.Spec
	machine.BootDelay, machine.JoinDelay, machine.TerminationDelay = delay(g.Boot), delay(g.Join), delay(g.Termination)
	if g.Held {
		machine.StuckAt = simv1.StageBoot
	}
	of := lo.CoalesceOrEmpty(g.Cluster, sandbox.ClusterName)
	md := nodegroup.Deployment(of, g.Name, template.Name)
	md.Labels = map[string]string{agentv1.MemberLabel: ""}
	md.Annotations = map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "0"}
	if g.Max > 0 {
		md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = strconv.Itoa(g.Max)
	}
	for _, object := range []client.Object{template, md} {
		if err := s.Hub.Create(ctx, object); err != nil {
			return fmt.Errorf("creating %T %s: %w", object, g.Name, err)
		}
	}
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		r, err := s.Agent.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: of}, Id: groupID(g.Name),
		})
		available := r.GetNodeGroup().GetAvailability()
		return lo.Ternary(available.GetAvailable(), "", fmt.Sprintf("node group %s to be available: %s", g.Name, available.GetMessage())), err
	})
}

// Unhold lets all existing machines boot.
func (s *Env) Unhold(ctx context.Context) error {
	var list simv1.SimMachineList
	if err := s.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
		return err
	}
	_, err := AtOnce(ctx, list.Items, func(ctx context.Context, m simv1.SimMachine) error {
		return s.Hub.Patch(ctx, &m, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"stuckAt":null}}`)))
	})
	return err
}

func cluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

func groupID(name string) string { return sandbox.ClusterNamespace + "/" + name }

// ClaimRequest is a claim to make.
type ClaimRequest struct {
	ID string
	// Groups are the names of the candidate node groups, best first.
	Groups []string
	// Adopt is the Machine to adopt. Empty means a new one.
	Adopt string
}

// Claim creates the claims, all at once, and returns the duration of each call.
func (s *Env) Claim(ctx context.Context, requested []ClaimRequest) ([]time.Duration, error) {
	return AtOnce(ctx, requested, func(ctx context.Context, w ClaimRequest) error {
		_, err := s.Agent.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: cluster(), ClaimId: w.ID, Holder: Holder, DisplayName: w.ID,
			Candidates: lo.Map(w.Groups, func(name string, _ int) string { return groupID(name) }), AdoptMachine: w.Adopt,
		})
		return err
	})
}

// Return returns the claims' Machines to the user, all at once, and returns the duration of each
// call.
func (s *Env) Return(ctx context.Context, requested []ClaimRequest) ([]time.Duration, error) {
	return AtOnce(ctx, requested, func(ctx context.Context, w ClaimRequest) error {
		_, err := s.Agent.Claims.ReturnMachine(ctx, &agentv1alpha1.ReturnMachineRequest{Cluster: cluster(), ClaimId: w.ID})
		return err
	})
}

// Release releases the claims, all at once, and returns the duration of each call.
func (s *Env) Release(ctx context.Context, requested []ClaimRequest) ([]time.Duration, error) {
	return AtOnce(ctx, requested, func(ctx context.Context, w ClaimRequest) error {
		_, err := s.Agent.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{Cluster: cluster(), ClaimId: w.ID, Drained: true})
		return err
	})
}

// AtOnce makes all calls concurrently and returns the duration of each.
func AtOnce[T any](ctx context.Context, items []T, call func(context.Context, T) error) ([]time.Duration, error) {
	took := make([]time.Duration, len(items))
	var calls errgroup.Group
	for i, item := range items {
		calls.Go(func() error {
			began := time.Now()
			err := call(ctx, item)
			took[i] = time.Since(began)
			return err
		})
	}
	return took, calls.Wait()
}

// Claims returns the live claims of this package, as reported by the agent.
func (s *Env) Claims(ctx context.Context) ([]*agentv1alpha1.Claim, error) {
	r, err := s.Agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: cluster(), Holder: Holder})
	return r.GetClaims(), err
}

// AwaitBound waits until each of the claims has a Machine with its label.
func (s *Env) AwaitBound(ctx context.Context, requested []ClaimRequest) error {
	wanted := set(requested)
	return s.AwaitMachines(ctx, func(machines []Machine) string {
		bound := lo.CountBy(machines, func(m Machine) bool { return wanted[m.Claim] })
		return lo.Ternary(bound == len(requested), "", fmt.Sprintf("every claim to have a Machine: %d of %d have", bound, len(requested)))
	})
}

func set(requested []ClaimRequest) map[string]bool {
	return lo.SliceToMap(requested, func(w ClaimRequest) (string, bool) { return w.ID, true })
}

// AwaitServed waits until the agent reports each of the claims as Bound, with a provider ID.
func (s *Env) AwaitServed(ctx context.Context, requested []ClaimRequest) error {
	wanted := set(requested)
	// The hub's Machines first: watching them does not cost the agent anything.
	err := s.AwaitMachines(ctx, func(machines []Machine) string {
		served := lo.CountBy(machines, func(m Machine) bool { return wanted[m.Claim] && m.ProviderID != "" })
		missing := fmt.Sprintf("every claim to have a Machine with a provider ID: %d of %d have", served, len(requested))
		return lo.Ternary(served == len(requested), "", missing)
	})
	if err != nil {
		return err
	}
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		claims, err := s.Claims(ctx)
		bound := lo.CountBy(claims, func(c *agentv1alpha1.Claim) bool {
			return wanted[c.GetClaimId()] && c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND && c.GetMachine().GetProviderId() != ""
		})
		return lo.Ternary(bound == len(requested), "", fmt.Sprintf("every claim to be told as Bound: %d of %d are", bound, len(requested))), err
	})
}

// AwaitGone waits until the agent reports no live claim, and the node groups have neither Machines
// nor replicas.
func (s *Env) AwaitGone(ctx context.Context, groups ...string) error {
	if err := s.AwaitMachines(ctx, func(machines []Machine) string {
		left := lo.CountBy(machines, func(m Machine) bool { return lo.Contains(groups, m.Group) })
		return lo.Ternary(left == 0, "", fmt.Sprintf("%d Machines to go", left))
	}); err != nil {
		return err
	}
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		claims, err := s.Claims(ctx)
		if err != nil || len(claims) > 0 {
			return fmt.Sprintf("%d claims to end", len(claims)), err
		}
		for _, name := range groups {
			md, err := s.Deployment(ctx, name)
			if err != nil || ptr.Deref(md.Spec.Replicas, 0) != 0 || ptr.Deref(md.Status.Replicas, 0) != 0 {
				return "replicas of " + name + " to be zero", err
			}
		}
		return "", nil
	})
}

// Deployment reads a node group's MachineDeployment.
func (s *Env) Deployment(ctx context.Context, name string) (*clusterv1.MachineDeployment, error) {
	md := &clusterv1.MachineDeployment{}
	err := s.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: name}, md)
	return md, err
}

// Scale sets a node group's replicas, as a user does.
func (s *Env) Scale(ctx context.Context, name string, replicas int) error {
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}}
	return s.Hub.Patch(ctx, md, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)))
}

// Machine is the watched part of a Machine.
type Machine struct {
	Name, Group, Claim, ProviderID, Node string
	Deleting                             bool
}

// AwaitMachines waits until the condition, evaluated on the hub's Machines, reports nothing
// missing.
func (s *Env) AwaitMachines(ctx context.Context, missing func([]Machine) string) error {
	return s.machines.await(ctx, missing)
}

// machines follows the hub's Machines, even when the API server ends its watches, as it does when a
// CRD changes.
type machines struct {
	stop func()

	mu      sync.Mutex
	known   map[string]Machine
	changed chan struct{} // closed and replaced at every change
}

func watchMachines(ctx context.Context, config *rest.Config) (*machines, error) {
	follower, err := cache.New(config, cache.Options{
		Scheme: testenv.Scheme(), DefaultNamespaces: map[string]cache.Config{sandbox.ClusterNamespace: {}},
	})
	if err != nil {
		return nil, err
	}
	m := &machines{known: map[string]Machine{}, changed: make(chan struct{})}
	// The watch outlives the start.
	following, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() { _ = follower.Start(following) }) // it only fails if it is started twice
	m.stop = func() {
		cancel()
		running.Wait()
	}
	gone := func(machine *clusterv1.Machine) { m.update(func() { delete(m.known, machine.Name) }) }
	if err := informers.Follow(ctx, follower, &clusterv1.Machine{}, m.set, gone); err != nil {
		m.stop()
		return nil, err
	}
	return m, nil
}

func (m *machines) set(machine *clusterv1.Machine) {
	m.update(func() {
		m.known[machine.Name] = Machine{
			Name: machine.Name, Group: machine.Labels[clusterv1.MachineDeploymentNameLabel], Claim: machine.Labels[agentv1.ClaimLabel],
			ProviderID: machine.Spec.ProviderID, Node: machine.Status.NodeRef.Name, Deleting: !machine.DeletionTimestamp.IsZero(),
		}
	})
}

func (m *machines) update(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *machines) await(ctx context.Context, missing func([]Machine) string) error {
	for {
		m.mu.Lock()
		reason, changed := missing(lo.Values(m.known)), m.changed
		m.mu.Unlock()
		if reason == "" {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("still waiting for %s: %w", reason, context.Cause(ctx))
		}
	}
}
