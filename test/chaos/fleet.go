package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	// blockedVersion is newer than the control plane's version, so Cluster API's preflight checks
	// block its Machines.
	blockedVersion = "v1.37.0"

	readyWithin = 90 * time.Second
	goneWithin  = 2 * time.Minute
)

// group is a node group.
type group struct {
	name     string
	own      int32 // the user's replicas
	max      int32
	onDelete bool
	version  string
	boot     time.Duration
	failure  *simv1.MachineFailure
	revision int
	labels   map[string]string
}

// newGroup returns a group whose instances start and stop quickly.
func newGroup(name string, own, limit int32) *group {
	return &group{name: name, own: own, max: limit, version: nodegroup.Version, boot: 300 * time.Millisecond}
}

func (g *group) template() string { return fmt.Sprintf("%s-r%d", g.name, g.revision) }

func (g *group) key() types.NamespacedName {
	return types.NamespacedName{Namespace: sandbox.ClusterNamespace, Name: g.name}
}

func (g *group) machineTemplate() *simv1.SimMachineTemplate {
	delay := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	template := nodegroup.Template(g.template())
	machine := &template.Spec.Template.Spec
	machine.InstanceType, machine.Failure = "chaos", g.failure
	machine.BootDelay, machine.JoinDelay, machine.TerminationDelay = delay(g.boot), delay(200*time.Millisecond), delay(200*time.Millisecond)
	return template
}

func (g *group) deployment() *clusterv1.MachineDeployment {
	md := nodegroup.Deployment(sandbox.ClusterName, g.name, g.template())
	md.Labels = lo.Assign(map[string]string{agentv1.MemberLabel: ""}, g.labels)
	md.Annotations = map[string]string{
		clusterv1.AutoscalerMinSizeAnnotation: "0",
		clusterv1.AutoscalerMaxSizeAnnotation: strconv.Itoa(int(g.max)),
	}
	md.Spec.Replicas, md.Spec.Template.Spec.Version = new(g.own), g.version
	if g.onDelete {
		md.Spec.Rollout.Strategy.Type = clusterv1.OnDeleteMachineDeploymentStrategyType
	}
	return md
}

// build creates node groups and waits until the users' own machines run.
func (s *environment) build(ctx context.Context, groups ...*group) error {
	s.mu.Lock()
	s.groups = append(s.groups, groups...)
	s.mu.Unlock()
	for _, g := range groups {
		s.intent.share(g.name, g.own, 0)
		if err := s.Hub.Create(ctx, g.machineTemplate()); err != nil {
			return err
		}
		if err := s.Hub.Create(ctx, g.deployment()); err != nil {
			return err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for _, g := range groups {
		if g.own == 0 || g.version == blockedVersion {
			continue
		}
		if err := s.awaitNodes(bounded, g, int(g.own)); err != nil {
			return err
		}
		machines, err := s.machines(ctx, g)
		if err != nil {
			return err
		}
		s.intent.update(func() {
			for i := range machines {
				s.intent.own[machines[i].UID] = g.name
			}
		})
	}
	return nil
}

// awaitNodes waits until n Machines of a group have a Node.
func (s *environment) awaitNodes(ctx context.Context, g *group, n int) error {
	return testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		machines, err := s.machines(ctx, g)
		if err != nil {
			return "", err
		}
		joined := lo.CountBy(machines, func(m clusterv1.Machine) bool { return m.Status.NodeRef.Name != "" })
		return lo.Ternary(joined >= n, "", fmt.Sprintf("%d Machines of %s with a Node (%d of %d have one)", n, g.name, joined, len(machines))), nil
	})
}

func (s *environment) machines(ctx context.Context, g *group) ([]clusterv1.Machine, error) {
	var list clusterv1.MachineList
	err := s.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: g.name})
	return list.Items, err
}

// machineOf returns the Machine that a claim is bound to, or nil if it is gone.
func (s *environment) machineOf(ctx context.Context, claimID string) (*clusterv1.Machine, error) {
	record := s.auditor.Claim(claimID)
	if record == nil || record.Machine.Name == "" {
		return nil, nil
	}
	var m clusterv1.Machine
	err := s.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: record.Machine.Name}, &m)
	if apierrors.IsNotFound(err) || err == nil && m.UID != record.Machine.UID {
		return nil, nil
	}
	return &m, err
}

// raze deletes node groups whose claims have been released, and waits until nothing is left of
// them.
func (s *environment) raze(ctx context.Context, groups ...*group) error {
	s.intent.update(func() {
		for _, g := range groups {
			s.intent.torn[g.name] = true
			delete(s.intent.shares, g.name)
		}
	})
	bounded, cancel := context.WithTimeout(ctx, goneWithin)
	defer cancel()
	for _, g := range groups {
		md := g.deployment()
		if err := client.IgnoreNotFound(s.Hub.Delete(bounded, md)); err != nil {
			return err
		}
	}
	for _, g := range groups {
		if err := testenv.Poll(bounded, func(ctx context.Context) (string, error) {
			machines, err := s.machines(ctx, g)
			if err != nil || len(machines) > 0 {
				return fmt.Sprintf("%d Machines of %s to go", len(machines), g.name), err
			}
			err = s.Hub.Get(ctx, g.key(), &clusterv1.MachineDeployment{})
			return lo.Ternary(apierrors.IsNotFound(err), "", "MachineDeployment "+g.name+" to go"), client.IgnoreNotFound(err)
		}); err != nil {
			return err
		}
		for r := range g.revision + 1 {
			t := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: fmt.Sprintf("%s-r%d", g.name, r)}}
			if err := client.IgnoreNotFound(s.Hub.Delete(bounded, t)); err != nil {
				return err
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.groups = lo.Without(s.groups, groups...)
	return nil
}

// clear removes what a failed scenario has left, so that it does not affect the next one.
func (s *environment) clear(ctx context.Context) error {
	for _, id := range s.holders.wanted() {
		s.holders.drop(id)
	}
	for _, component := range []string{sandbox.ClusterAPI, sandbox.ClusterAPIWebhooks} {
		if err := s.Sandbox.Resume(component); err != nil {
			return err
		}
	}
	if err := s.useAgents(ctx, 1); err != nil {
		return err
	}
	s.mu.Lock()
	groups := slices.Clone(s.groups)
	s.mu.Unlock()
	return s.raze(ctx, groups...)
}

// rollOut gives the group a new template. Under OnDelete its next Machines belong to a new
// MachineSet.
func (s *environment) rollOut(ctx context.Context, g *group) error {
	g.revision++
	if err := s.Hub.Create(ctx, g.machineTemplate()); err != nil {
		return err
	}
	return s.useTemplate(ctx, g, g.template())
}

func (s *environment) useTemplate(ctx context.Context, g *group, template string) error {
	patch, err := json.Marshal([]map[string]any{
		{"op": "replace", "path": "/spec/template/spec/infrastructureRef/name", "value": template},
	})
	if err != nil {
		return err
	}
	return s.Hub.Patch(ctx, &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: g.key().Namespace, Name: g.name}},
		client.RawPatch(types.JSONPatchType, patch))
}

// scale changes replicas like a user who reads them and writes another number, and records to whom
// they belong. It writes only if the number is still the one that was read, so that the number that
// the user requested is known exactly.
func (s *environment) scale(ctx context.Context, g *group, by int32) error {
	return s.rewrite(ctx, g, func(md *clusterv1.MachineDeployment) edit {
		replicas := ptr.Deref(md.Spec.Replicas, 0)
		now := max(0, replicas+by)
		switch repeated := s.intent.repeats(g.name, now); {
		case repeated && by > 0:
			now++
		case repeated:
			return edit{patch: []operation{}}
		}
		lowered := int(max(0, replicas-now))
		return edit{
			patch: []operation{test("/spec/replicas", replicas), replace("/spec/replicas", now)},
			// Cluster API may act on it before the answer arrives.
			begin: func() {
				s.intent.update(func() { s.intent.lowered[g.name] += lowered })
				if lowered > 0 {
					s.intent.disown(g.name)
				}
			},
			end: func(applied bool) {
				if applied {
					s.intent.update(func() { s.intent.wrote[g.name] = now })
					s.intent.share(g.name, now-replicas, 0)
				} else {
					s.intent.update(func() { s.intent.lowered[g.name] -= lowered })
				}
			},
		}
	})
}

// operation is an operation of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func test(path string, value any) operation    { return operation{"test", path, value} }
func replace(path string, value any) operation { return operation{"replace", path, value} }

// edit is a user's change of a MachineDeployment.
type edit struct {
	patch []operation
	// begin is called before the patch is sent, and end when it was applied or refused. Both may be
	// nil.
	begin func()
	end   func(applied bool)
}

// rewrite changes a group's MachineDeployment based on its current state, and retries on conflicts.
func (s *environment) rewrite(ctx context.Context, g *group, change func(*clusterv1.MachineDeployment) edit) error {
	for {
		var md clusterv1.MachineDeployment
		if err := s.Hub.Get(ctx, g.key(), &md); err != nil {
			return err
		}
		e := change(&md)
		patch, err := json.Marshal(e.patch)
		if err != nil {
			return err
		}
		if e.begin != nil {
			e.begin()
		}
		err = s.Hub.Patch(ctx, &md, client.RawPatch(types.JSONPatchType, patch))
		if e.end != nil {
			e.end(err == nil)
		}
		switch {
		case err == nil:
			s.journal.add("person: MachineDeployment %s %.1500s", g.name, patch)
			return nil
		case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		case apierrors.IsInternalError(err), apierrors.IsServerTimeout(err), apierrors.IsTimeout(err):
			if err := wait(ctx, time.Second); err != nil {
				return err
			}
		default:
			return err
		}
	}
}
