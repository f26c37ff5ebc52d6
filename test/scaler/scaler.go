// Package scaler is a cluster-autoscaler that is reduced to its calls. It makes the calls that the
// provider externalgrpc and the main loop of the cluster-autoscaler 1.36 make, in the same order
// and with the same caches, and decides simply: a pod needs a node, and a node without pods is
// unneeded.
//
// The order is that of StaticAutoscaler.RunOnce: GPU label, Refresh, NodeGroups, templates, target
// sizes, instances, the group and the options of each node; then unregistered nodes, failed
// instances, sizes that do not fit; then a scale-up, or a scale-down.
package scaler

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/samber/lo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// These are the cluster-autoscaler's own.
const (
	callTimeout   = 5 * time.Second
	instancesLife = 2 * time.Minute
	deletionTaint = "ToBeDeletedByClusterAutoscaler"
	fakeReason    = "k8s.io/cluster-autoscaler/fake-node-reason"
	unregistered  = "unregistered"
	createError   = "create-error"
)

// Config configures a [Scaler]. The times are shorter than the cluster-autoscaler's, which has
// minutes.
type Config struct {
	// Conn is the connection to the agent. REQUIRED.
	Conn grpc.ClientConnInterface
	// Cluster is a client of the cluster with the nodes and pods. REQUIRED.
	Cluster client.Client
	// Interval is the time between two loops. REQUIRED.
	Interval time.Duration
	// MaxNodeProvisionTime is how long a node may take to register.
	MaxNodeProvisionTime time.Duration
	// Backoff is how long a group is left alone after a failed scale-up.
	Backoff time.Duration
	// UnneededTime is how long a node must be without pods.
	UnneededTime time.Duration
	// Log receives what the scaler does.
	Log func(format string, args ...any)
}

// Scaler scales. Its loops must not overlap.
type Scaler struct {
	Config

	provider externalgrpc.CloudProviderClient

	// These are the provider's caches.
	groups   []*externalgrpc.NodeGroup
	groupOf  map[string]*externalgrpc.NodeGroup
	gpuLabel *string
	gpuTypes map[string]struct{}
	// These are the cluster state's.
	instances    map[string]cachedInstances
	unregistered map[string]time.Time // by ID of the instance
	misfits      map[string]time.Time // by group
	unneeded     map[string]time.Time // by node
	backoff      map[string]time.Time // by group

	mu      sync.Mutex
	deleted []string
	failed  int
}

type cachedInstances struct {
	at   time.Time
	list []*externalgrpc.Instance
}

// Dial connects like the provider externalgrpc: with a certificate that is read once, lazily, and
// without retries.
func Dial(address, certFile, keyFile, caFile string) (*grpc.ClientConn, error) {
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate: %w", err)
	}
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("reading the authority: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s has no certificate", caFile)
	}
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{certificate}, RootCAs: pool, MinVersion: tls.VersionTLS12,
	})))
}

// New returns a scaler.
func New(c Config) *Scaler {
	return &Scaler{
		Config: c, provider: externalgrpc.NewCloudProviderClient(c.Conn),
		instances: map[string]cachedInstances{}, unregistered: map[string]time.Time{}, misfits: map[string]time.Time{},
		unneeded: map[string]time.Time{}, backoff: map[string]time.Time{},
	}
}

// Run runs loops until the context ends. A loop that fails is followed by the next.
func (s *Scaler) Run(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := s.RunOnce(ctx); err != nil && ctx.Err() == nil {
			s.Log("the loop ended early: %v", err)
			s.mu.Lock()
			s.failed++
			s.mu.Unlock()
		}
	}, s.Interval)
}

// Deleted returns the provider IDs of the nodes that have been deleted as unneeded.
func (s *Scaler) Deleted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return lo.Uniq(s.deleted)
}

// FailedLoops returns how many loops ended with an error.
func (s *Scaler) FailedLoops() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// node is a node as the provider sends it.
func node(n *corev1.Node) *externalgrpc.ExternalGrpcNode {
	return &externalgrpc.ExternalGrpcNode{ProviderID: n.Spec.ProviderID, Name: n.Name, Labels: n.Labels, Annotations: n.Annotations}
}

// fake is the node that the cluster-autoscaler makes up for an instance.
func fake(id, reason string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: id, Annotations: map[string]string{fakeReason: reason}},
		Spec:       corev1.NodeSpec{ProviderID: id},
	}
}

func call[Request, Response any](
	ctx context.Context, method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request,
) (Response, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return method(ctx, request)
}

// state is what one loop sees.
type state struct {
	nodes     []corev1.Node
	pods      []corev1.Pod
	templates map[string]*corev1.Node
	targets   map[string]int32
	// ready and registered are the nodes of each group.
	registered map[string][]*corev1.Node
	maximum    map[string]int32
	fresh      map[string]int // unregistered instances that may still come
}

// used returns the names of the nodes that pods run on, but for those of DaemonSets.
func (s *state) used() map[string]bool {
	used := map[string]bool{}
	for i := range s.pods {
		if p := &s.pods[i]; p.Spec.NodeName != "" && !ofDaemonSet(p) && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			used[p.Spec.NodeName] = true
		}
	}
	return used
}

// RunOnce runs one loop.
func (s *Scaler) RunOnce(ctx context.Context) error {
	now := time.Now()
	var nodes corev1.NodeList
	var pods corev1.PodList
	if err := s.Cluster.List(ctx, &nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	if err := s.Cluster.List(ctx, &pods); err != nil {
		return fmt.Errorf("listing pods: %w", err)
	}
	s.askGPUs(ctx)
	s.groups, s.groupOf = nil, map[string]*externalgrpc.NodeGroup{}
	if _, err := call(ctx, s.provider.Refresh, &externalgrpc.RefreshRequest{}); err != nil {
		return fmt.Errorf("refreshing: %w", err)
	}
	seen := &state{
		nodes: nodes.Items, pods: pods.Items, templates: map[string]*corev1.Node{}, targets: map[string]int32{},
		registered: map[string][]*corev1.Node{}, maximum: map[string]int32{}, fresh: map[string]int{},
	}
	if err := s.template(ctx, seen); err != nil {
		return err
	}
	if err := s.update(ctx, seen, now); err != nil {
		return err
	}
	s.removeUnregistered(ctx, seen, now)
	s.removeFailed(ctx, now)
	if fixed, err := s.fixSizes(ctx, seen, now); fixed || err != nil {
		return err
	}
	if scaled, err := s.scaleUp(ctx, seen, now); scaled || err != nil {
		return err
	}
	return s.scaleDown(ctx, seen, now)
}

// askGPUs asks for the GPU label and the types until they have been answered once.
func (s *Scaler) askGPUs(ctx context.Context) {
	if s.gpuLabel == nil {
		if response, err := call(ctx, s.provider.GPULabel, &externalgrpc.GPULabelRequest{}); err == nil {
			s.gpuLabel = new(response.GetLabel())
		}
	}
	if s.gpuTypes == nil {
		if response, err := call(ctx, s.provider.GetAvailableGPUTypes, &externalgrpc.GetAvailableGPUTypesRequest{}); err == nil {
			s.gpuTypes = lo.MapValues(response.GetGpuTypes(), func(*anypb.Any, string) struct{} { return struct{}{} })
		}
	}
}

// nodeGroups returns the groups. An error means that there are none, and is not cached.
func (s *Scaler) nodeGroups(ctx context.Context) []*externalgrpc.NodeGroup {
	if s.groups == nil {
		response, err := call(ctx, s.provider.NodeGroups, &externalgrpc.NodeGroupsRequest{})
		if err != nil {
			s.Log("NodeGroups: %v", err)
			return nil
		}
		s.groups = append([]*externalgrpc.NodeGroup{}, response.GetNodeGroups()...)
	}
	return s.groups
}

// nodeGroupForNode returns the group of a node, or nil. Only groups are cached.
func (s *Scaler) nodeGroupForNode(ctx context.Context, n *corev1.Node) (*externalgrpc.NodeGroup, error) {
	key := n.Name + n.Spec.ProviderID
	if known := s.groupOf[key]; known != nil {
		return known, nil
	}
	response, err := call(ctx, s.provider.NodeGroupForNode, &externalgrpc.NodeGroupForNodeRequest{Node: node(n)})
	if err != nil || response.GetNodeGroup().GetId() == "" {
		return nil, err
	}
	s.groupOf[key] = response.GetNodeGroup()
	return response.GetNodeGroup(), nil
}

// template asks for a template of each group without a ready node.
func (s *Scaler) template(ctx context.Context, seen *state) error {
	for i := range seen.nodes {
		n := &seen.nodes[i]
		group, err := s.nodeGroupForNode(ctx, n)
		if err != nil {
			return fmt.Errorf("NodeGroupForNode of %s: %w", n.Name, err)
		}
		if group != nil && ready(n) {
			seen.templates[group.GetId()] = n
		}
	}
	for _, group := range s.nodeGroups(ctx) {
		seen.maximum[group.GetId()] = group.GetMaxSize()
		if seen.templates[group.GetId()] != nil {
			continue
		}
		response, err := call(ctx, s.provider.NodeGroupTemplateNodeInfo, &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: group.GetId()})
		if status.Code(err) == codes.Unimplemented {
			continue
		}
		if err != nil {
			s.Log("NodeGroupTemplateNodeInfo of %s: %v", group.GetId(), err)
			continue
		}
		var template corev1.Node
		if err := template.Unmarshal(response.GetNodeBytes()); err != nil {
			return fmt.Errorf("the template of %s: %w", group.GetId(), err)
		}
		seen.templates[group.GetId()] = &template
	}
	return nil
}

// update asks for the sizes, the instances, and each node's group and options.
func (s *Scaler) update(ctx context.Context, seen *state, now time.Time) error {
	for _, group := range s.nodeGroups(ctx) {
		response, err := call(ctx, s.provider.NodeGroupTargetSize, &externalgrpc.NodeGroupTargetSizeRequest{Id: group.GetId()})
		if err != nil {
			return fmt.Errorf("NodeGroupTargetSize of %s: %w", group.GetId(), err)
		}
		seen.targets[group.GetId()] = response.GetTargetSize()
	}
	for i := range seen.nodes {
		n := &seen.nodes[i]
		group, err := s.nodeGroupForNode(ctx, n)
		if err != nil {
			return fmt.Errorf("NodeGroupForNode of %s: %w", n.Name, err)
		}
		if group == nil {
			continue
		}
		seen.registered[group.GetId()] = append(seen.registered[group.GetId()], n)
		for range 2 { // the start-up time and the provisioning time are asked for apart
			if err := s.options(ctx, group.GetId()); err != nil {
				s.Log("NodeGroupGetOptions of %s: %v", group.GetId(), err)
			}
		}
	}
	for _, group := range s.nodeGroups(ctx) {
		id := group.GetId()
		if cached := s.instances[id]; now.Sub(cached.at) < instancesLife && int(seen.targets[id]) == len(seen.registered[id]) {
			continue // each loop only while it scales up
		}
		response, err := call(ctx, s.provider.NodeGroupNodes, &externalgrpc.NodeGroupNodesRequest{Id: id})
		if err != nil {
			return fmt.Errorf("NodeGroupNodes of %s: %w", id, err)
		}
		s.instances[id] = cachedInstances{at: now, list: response.GetInstances()}
	}
	return nil
}

func (s *Scaler) options(ctx context.Context, group string) error {
	_, err := call(ctx, s.provider.NodeGroupGetOptions, &externalgrpc.NodeGroupAutoscalingOptionsRequest{
		Id: group, Defaults: &externalgrpc.NodeGroupAutoscalingOptions{
			ScaleDownUtilizationThreshold: 0.5, ScaleDownUnneededDuration: durationpb.New(s.UnneededTime),
			ScaleDownUnreadyDuration: durationpb.New(20 * time.Minute), MaxNodeProvisionDuration: durationpb.New(s.MaxNodeProvisionTime),
		},
	})
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	return err
}

// removeUnregistered deletes instances whose nodes did not register in time.
func (s *Scaler) removeUnregistered(ctx context.Context, seen *state, now time.Time) {
	known := lo.SliceToMap(seen.nodes, func(n corev1.Node) (string, bool) { return n.Spec.ProviderID, true })
	since := map[string]time.Time{}
	old := map[string][]*corev1.Node{}
	for id, cached := range s.instances {
		for _, instance := range cached.list {
			state := instance.GetStatus()
			if known[instance.GetId()] || state.GetInstanceState() == externalgrpc.InstanceStatus_instanceDeleting ||
				state.GetErrorInfo().GetErrorCode() != "" {
				continue
			}
			begun, before := s.unregistered[instance.GetId()]
			if !before {
				begun = now
			}
			since[instance.GetId()] = begun
			if s.MaxNodeProvisionTime > 0 && now.Sub(begun) > s.MaxNodeProvisionTime {
				old[id] = append(old[id], fake(instance.GetId(), unregistered))
			} else {
				seen.fresh[id]++
			}
		}
	}
	s.unregistered = since
	for id, nodes := range old {
		s.Log("%d nodes of %s did not register in time", len(nodes), id)
		s.deleteFake(ctx, id, nodes)
	}
}

// removeFailed deletes instances that could not be created, and leaves their groups alone for a
// while.
func (s *Scaler) removeFailed(ctx context.Context, now time.Time) {
	for id, cached := range s.instances {
		var nodes []*corev1.Node
		for _, instance := range cached.list {
			if failure := instance.GetStatus().GetErrorInfo(); failure.GetErrorCode() != "" &&
				instance.GetStatus().GetInstanceState() == externalgrpc.InstanceStatus_instanceCreating {
				s.Log("%s of %s failed (class %d, %s): %s",
					instance.GetId(), id, failure.GetInstanceErrorClass(), failure.GetErrorCode(), failure.GetErrorMessage())
				nodes = append(nodes, fake(instance.GetId(), createError))
			}
		}
		if len(nodes) > 0 {
			s.backoff[id] = now.Add(s.Backoff)
			s.deleteFake(ctx, id, nodes)
		}
	}
}

func (s *Scaler) deleteFake(ctx context.Context, id string, nodes []*corev1.Node) {
	for _, n := range nodes {
		if group, err := s.nodeGroupForNode(ctx, n); err != nil || group.GetId() != id {
			s.Log("%s is of group %q, not %s (%v)", n.Name, group.GetId(), id, err)
			return
		}
	}
	if err := s.deleteNodes(ctx, id, nodes); err != nil {
		s.Log("%v", err)
	}
}

func (s *Scaler) deleteNodes(ctx context.Context, id string, nodes []*corev1.Node) error {
	delete(s.instances, id)
	_, err := call(ctx, s.provider.NodeGroupDeleteNodes, &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: id, Nodes: lo.Map(nodes, func(n *corev1.Node, _ int) *externalgrpc.ExternalGrpcNode { return node(n) }),
	})
	if err != nil {
		return fmt.Errorf("NodeGroupDeleteNodes of %s: %w", id, err)
	}
	return nil
}

// fixSizes lowers the target size of groups that have had fewer nodes for too long.
func (s *Scaler) fixSizes(ctx context.Context, seen *state, now time.Time) (fixed bool, err error) {
	for id, target := range seen.targets {
		delta := int32(len(seen.registered[id])) - target
		if delta >= 0 {
			delete(s.misfits, id)
			continue
		}
		if _, known := s.misfits[id]; !known {
			s.misfits[id] = now
		}
		if s.MaxNodeProvisionTime == 0 || now.Sub(s.misfits[id]) < s.MaxNodeProvisionTime {
			continue
		}
		_, err := call(ctx, s.provider.NodeGroupDecreaseTargetSize, &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: id, Delta: delta})
		if err != nil {
			return false, fmt.Errorf("NodeGroupDecreaseTargetSize of %s: %w", id, err)
		}
		s.Log("lowered the target size of %s by %d", id, -delta)
		delete(s.misfits, id)
		fixed = true
	}
	return fixed, nil
}

// scaleUp makes room for the pods that do not fit, on the cheapest group whose template fits.
func (s *Scaler) scaleUp(ctx context.Context, seen *state, now time.Time) (scaled bool, err error) {
	used := seen.used()
	var errs []error
	for _, group := range s.nodeGroups(ctx) {
		id, template := group.GetId(), seen.templates[group.GetId()]
		if template == nil || now.Before(s.backoff[id]) {
			continue
		}
		pending := lo.Filter(seen.pods, func(p corev1.Pod, _ int) bool { return unschedulable(&p) && fits(&p, template) })
		there := lo.Filter(seen.registered[id], func(n *corev1.Node, _ int) bool { return ready(n) })
		upcoming := max(seen.targets[id]-int32(len(there)), 0)
		// The cluster-autoscaler leaves out the pods that fit on nodes that are there, which the
		// scheduler may not have seen yet. An empty node has room for one of them at least.
		need := int32(len(pending)) - upcoming - int32(lo.CountBy(there, func(n *corev1.Node) bool { return !used[n.Name] }))
		if need <= 0 {
			continue
		}
		s.price(ctx, id, template, &pending[0], now)
		response, err := call(ctx, s.provider.NodeGroupTargetSize, &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
		if err != nil {
			errs = append(errs, fmt.Errorf("NodeGroupTargetSize of %s: %w", id, err))
			continue
		}
		if need = min(need, group.GetMaxSize()-response.GetTargetSize()); need <= 0 {
			continue
		}
		s.Log("%s: %d pods do not fit, %d nodes are coming: %d more", id, len(pending), upcoming, need)
		if _, err := call(ctx, s.provider.NodeGroupIncreaseSize, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: need}); err != nil {
			s.backoff[id] = now.Add(s.Backoff)
			errs = append(errs, fmt.Errorf("NodeGroupIncreaseSize of %s: %w", id, err))
			continue
		}
		scaled = true
	}
	return scaled, errors.Join(errs...)
}

// price asks what the price expander asks.
func (s *Scaler) price(ctx context.Context, group string, template *corev1.Node, pod *corev1.Pod, now time.Time) {
	start, end := timestamppb.New(now), timestamppb.New(now.Add(time.Hour))
	simulated := template.DeepCopy()
	simulated.Name = "template-node-for-" + group + "-1"
	if _, err := call(ctx, s.provider.PricingNodePrice, &externalgrpc.PricingNodePriceRequest{
		Node: node(simulated), StartTimestamp: start, EndTimestamp: end,
	}); err != nil {
		s.Log("PricingNodePrice: %v", err)
	}
	encoded, err := pod.Marshal()
	if err == nil {
		_, err = call(ctx, s.provider.PricingPodPrice, &externalgrpc.PricingPodPriceRequest{PodBytes: encoded, StartTimestamp: start, EndTimestamp: end})
	}
	if err != nil {
		s.Log("PricingPodPrice: %v", err)
	}
}

// scaleDown taints and deletes nodes that have been without pods for long enough.
func (s *Scaler) scaleDown(ctx context.Context, seen *state, now time.Time) error {
	used := seen.used()
	unneeded := map[string]time.Time{}
	var errs []error
	for id, nodes := range seen.registered {
		var empty []*corev1.Node
		for _, n := range nodes {
			if used[n.Name] {
				continue
			}
			since, known := s.unneeded[n.Name]
			if !known {
				since = now
			}
			unneeded[n.Name] = since
			if tainted(n) || now.Sub(since) >= s.UnneededTime {
				empty = append(empty, n)
			}
		}
		if len(empty) == 0 {
			continue
		}
		if err := s.options(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("NodeGroupGetOptions of %s: %w", id, err))
			continue
		}
		for _, n := range empty {
			if err := s.taint(ctx, n); err != nil {
				errs = append(errs, err)
			}
		}
		s.Log("%s: %d nodes are unneeded", id, len(empty))
		if err := s.deleteNodes(ctx, id, empty); err != nil {
			errs = append(errs, err)
			continue
		}
		s.mu.Lock()
		s.deleted = append(s.deleted, lo.Map(empty, func(n *corev1.Node, _ int) string { return n.Spec.ProviderID })...)
		s.mu.Unlock()
	}
	s.unneeded = unneeded
	return errors.Join(errs...)
}

func (s *Scaler) taint(ctx context.Context, n *corev1.Node) error {
	if tainted(n) {
		return nil
	}
	changed := n.DeepCopy()
	changed.Spec.Taints = append(changed.Spec.Taints, corev1.Taint{Key: deletionTaint, Value: "1", Effect: corev1.TaintEffectNoSchedule})
	if err := s.Cluster.Patch(ctx, changed, client.MergeFromWithOptions(n, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("tainting %s: %w", n.Name, err)
	}
	return nil
}

func tainted(n *corev1.Node) bool {
	return lo.ContainsBy(n.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == deletionTaint })
}

func ready(n *corev1.Node) bool {
	return lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func unschedulable(p *corev1.Pod) bool {
	return p.Spec.NodeName == "" && p.DeletionTimestamp == nil && lo.ContainsBy(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

// fits reports whether a node like the template could run the pod, by its node selector and its
// CPUs.
func fits(p *corev1.Pod, template *corev1.Node) bool {
	for key, value := range p.Spec.NodeSelector {
		if template.Labels[key] != value {
			return false
		}
	}
	for i := range p.Spec.Containers {
		if p.Spec.Containers[i].Resources.Requests.Cpu().Cmp(*template.Status.Allocatable.Cpu()) > 0 {
			return false
		}
	}
	return true
}

func ofDaemonSet(p *corev1.Pod) bool {
	return lo.ContainsBy(p.OwnerReferences, func(owner metav1.OwnerReference) bool { return owner.Kind == "DaemonSet" })
}
