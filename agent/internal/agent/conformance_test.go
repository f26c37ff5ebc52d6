package agent_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The real agent keeps the same contract as the fake: over mutual TLS, on a real API server, with a
// model of Cluster API.
func TestAgentConforms(t *testing.T) {
	conformance.Run(t, func(tb testing.TB) conformance.Env {
		tb.Helper()
		return newEnv(tb)
	})
}

const patience = 30 * time.Second

// aheadClock is the system clock, moved ahead.
type aheadClock struct {
	clock.RealClock

	ahead atomic.Int64
}

func (c *aheadClock) Now() time.Time {
	return c.RealClock.Now().Add(time.Duration(c.ahead.Load()))
}

func (c *aheadClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

type env struct {
	namespace string
	model     *capitest.Model
	clock     *aheadClock
	running   *running

	mu          sync.Mutex
	free        bool // machines progress by themselves
	provisioned map[string]bool
	joined      map[string]bool
	applied     map[string]conformance.MachineDeployment
}

func newEnv(tb testing.TB) *env {
	tb.Helper()
	e, c := newHub(tb)
	e.running = start(tb, c)
	return e
}

// newHub returns an env without an agent, and the configuration for its agents.
func newHub(tb testing.TB) (*env, agent.Config) {
	tb.Helper()
	e := &env{
		namespace: plane.Namespace(tb), clock: &aheadClock{},
		provisioned: map[string]bool{}, joined: map[string]bool{}, applied: map[string]conformance.MachineDeployment{},
	}
	plane.Create(tb, capitest.NewCluster(e.namespace, "spoke"))
	e.model = capitest.RunForTest(tb, plane, capitest.Options{Namespaces: []string{e.namespace}, Behaviour: e.behaviour})
	o := testOptions(e.namespace)
	o.SpareGracePeriod, o.HeartbeatInterval = time.Second, 100*time.Millisecond
	o.CollectGracePeriod = time.Second
	policy, err := authz.ParsePolicy(fmt.Appendf(nil, `identities:
- id: spiffe://karpenter-capi/cluster-autoscaler/%[1]s
  roles: [autoscaler]
  clusters: [%[1]s/spoke]
- id: spiffe://karpenter-capi/admin
  roles: [admin]
  allClusters: true
`, e.namespace), "karpenter-capi")
	require.NoError(tb, err)
	return e, agent.Config{Options: o, Clock: e.clock, Policy: func() *authz.Policy { return policy }}
}

// behaviour provisions the user's machines, and those of claims that the test has provisioned.
func (e *env) behaviour(machine *clusterv1.Machine) capitest.Behaviour {
	e.mu.Lock()
	defer e.mu.Unlock()
	return capitest.Behaviour{
		HoldProvision: !e.free && !e.provisioned[machine.Labels[v1alpha1.ClaimLabel]],
		HoldJoin:      !e.free && !e.joined[machine.Name],
	}
}

func (e *env) set(change func()) {
	e.mu.Lock()
	change()
	e.mu.Unlock()
	e.model.SetBehaviour(e.behaviour)
}

func (e *env) Cluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: e.namespace, Name: "spoke"}
}

func (e *env) Client() *client.Client { return e.running.client(e.namespace, "spoke") }

func (e *env) Autoscaler() *client.Client {
	return e.running.as("spiffe://karpenter-capi/cluster-autoscaler/" + e.namespace)
}

func (e *env) Admin() *client.Client { return e.running.as("spiffe://karpenter-capi/admin") }

func (e *env) Stranger() *client.Client { return e.running.client(e.namespace, "stranger") }

func (e *env) Patience() time.Duration { return patience }

func (e *env) CreateNodeGroup(tb testing.TB, d conformance.MachineDeployment) string {
	tb.Helper()
	md := capitest.NewMachineDeployment(e.namespace, d.Name, "spoke", ptr.Deref(d.Replicas, 0))
	maps.Copy(md.Labels, d.Labels)
	md.Annotations = maps.Clone(d.Annotations)
	md.Spec.Template.Spec.FailureDomain, md.Spec.Template.Spec.Version = d.FailureDomain, d.Version
	// The template is empty: everything known comes from the annotations.
	plane.Create(tb, capitest.NewInfrastructureTemplate(e.namespace, d.Name, nil))
	e.set(func() { e.free, e.applied[d.Name] = true, d })
	plane.Create(tb, md)
	id := e.namespace + "/" + d.Name
	eventually(tb, "the agent shows the node group and its machines", func(ctx context.Context) (bool, error) {
		_, err := e.Client().NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: e.Cluster(), Id: id})
		if err != nil {
			return false, nil //nolint:nilerr // It is not there yet.
		}
		machines, err := e.Client().Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster(), NodeGroupId: id})
		joined := lo.CountBy(machines.GetMachines(), func(machine *agentv1alpha1.Machine) bool { return machine.GetNodeName() != "" })
		return joined == int(ptr.Deref(d.Replicas, 0)), err
	})
	e.set(func() { e.free = false })
	return id
}

func (e *env) UpdateNodeGroup(tb testing.TB, d conformance.MachineDeployment) {
	tb.Helper()
	md := &clusterv1.MachineDeployment{}
	require.NoError(tb, plane.Client.Get(tb.Context(), types.NamespacedName{Namespace: e.namespace, Name: d.Name}, md))
	before := md.DeepCopy()
	e.mu.Lock()
	applied := e.applied[d.Name]
	e.applied[d.Name] = d
	e.mu.Unlock()
	// Labels and annotations of other writers are kept.
	md.Labels = lo.Assign(lo.OmitByKeys(md.Labels, lo.Keys(applied.Labels)), d.Labels)
	md.Annotations = lo.Assign(lo.OmitByKeys(md.Annotations, lo.Keys(applied.Annotations)), d.Annotations)
	md.Spec.Template.Spec.FailureDomain, md.Spec.Template.Spec.Version = d.FailureDomain, d.Version
	if d.Replicas != nil {
		md.Spec.Replicas = d.Replicas
	}
	require.NoError(tb, plane.Client.Patch(tb.Context(), md, ctrlclient.MergeFrom(before)))
}

func (e *env) DeleteNodeGroup(tb testing.TB, name string) {
	tb.Helper()
	md := &clusterv1.MachineDeployment{}
	md.Namespace, md.Name = e.namespace, name
	require.NoError(tb, plane.Client.Delete(tb.Context(), md))
}

func (e *env) HoldMachines(tb testing.TB, name string, hold bool) {
	tb.Helper()
	e.model.HoldCreation(types.NamespacedName{Namespace: e.namespace, Name: name}, hold)
}

func (e *env) ProvisionMachine(_ testing.TB, claimID string) {
	e.set(func() { e.provisioned[claimID] = true })
}

func (e *env) JoinNode(_ testing.TB, machineName string) {
	e.set(func() { e.joined[machineName] = true })
}

func (e *env) LoseMachine(tb testing.TB, machineName string) {
	tb.Helper()
	machine := &clusterv1.Machine{}
	machine.Namespace, machine.Name = e.namespace, machineName
	require.NoError(tb, plane.Client.Delete(tb.Context(), machine))
}

func (e *env) StaleToken(tb testing.TB, holder string) string {
	tb.Helper()
	response, err := e.Client().Claims.ListClaims(tb.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: e.Cluster(), Holder: holder})
	require.NoError(tb, err)
	e.clock.ahead.Add(int64(2 * time.Hour))
	return response.GetToken()
}

func (e *env) ApplyNodePoolSet(tb testing.TB, applied conformance.NodePoolSet) {
	tb.Helper()
	spec := v1alpha1.NodePoolSetSpec{
		ClusterSelector: &metav1.LabelSelector{}, DeletionPolicy: v1alpha1.DeletionPolicy(applied.DeletionPolicy),
		NodePools: templatesOf(applied.NodePools), NodeClasses: templatesOf(applied.NodeClasses),
	}
	set := &v1alpha1.NodePoolSet{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: applied.Name}}
	// The agent may write its status meanwhile.
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		if err := plane.Client.Get(tb.Context(), ctrlclient.ObjectKeyFromObject(set), set); err != nil {
			return err
		}
		set.Spec = spec
		return plane.Client.Update(tb.Context(), set)
	})
	if apierrors.IsNotFound(err) {
		e.awaitNewer(tb)
		set.Spec = spec
		plane.Create(tb, set)
		return
	}
	require.NoError(tb, err)
}

// awaitNewer waits until a NodePoolSet that is created is newer than those that exist: their ages
// are in whole seconds.
func (e *env) awaitNewer(tb testing.TB) {
	tb.Helper()
	var sets v1alpha1.NodePoolSetList
	require.NoError(tb, plane.Client.List(tb.Context(), &sets, ctrlclient.InNamespace(e.namespace)))
	eventually(tb, "the second in which the last NodePoolSet was created is over", func(context.Context) (bool, error) {
		now := time.Now().Truncate(time.Second)
		return !slices.ContainsFunc(sets.Items, func(set v1alpha1.NodePoolSet) bool { return !set.CreationTimestamp.Time.Before(now) }), nil
	})
}

func templatesOf(written []nodepoolset.Template) []v1alpha1.PublishedTemplate {
	values := func(plain map[string]string) map[string]v1alpha1.PublishedValue {
		return lo.MapValues(plain, func(value, _ string) v1alpha1.PublishedValue { return v1alpha1.PublishedValue(value) })
	}
	return lo.Map(written, func(t nodepoolset.Template, _ int) v1alpha1.PublishedTemplate {
		return v1alpha1.PublishedTemplate{
			Name: t.Name, Labels: values(t.Labels), Annotations: values(t.Annotations), Spec: runtime.RawExtension{Raw: t.Spec},
		}
	})
}

func (e *env) DeleteNodePoolSet(tb testing.TB, name string) {
	tb.Helper()
	set := &v1alpha1.NodePoolSet{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: name}}
	require.NoError(tb, plane.Client.Delete(tb.Context(), set))
}

var (
	_ conformance.Env        = &env{}
	_ conformance.Ageing     = &env{}
	_ conformance.Publishing = &env{}
)

func eventually(tb testing.TB, what string, check func(ctx context.Context) (bool, error)) {
	tb.Helper()
	err := wait.PollUntilContextTimeout(tb.Context(), 10*time.Millisecond, patience, true, check)
	require.NoError(tb, err, what)
}
