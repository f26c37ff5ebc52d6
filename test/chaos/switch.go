package chaos

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/bystander"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/migration"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	// switched is the number of Nodes with a pod in each of the two node groups.
	switched = 25
	// unfinished is the number of NodeClaims that the other provider is launching when it is
	// stopped, and of those that it is terminating.
	unfinished = 3
	// hubAway is how long the hub's API server is suspended in the middle of the switch.
	hubAway = 12 * time.Second
	// switchFor is how long agents and shim are killed, from the first start of the shim.
	switchFor = 45 * time.Second
)

// liveSwitch lets agents and shim take over what karpenter-provider-cluster-api leaves when it is
// stopped in the middle of its work. Meanwhile all of them are killed, and the hub is unreachable
// for a while.
func liveSwitch(ctx context.Context, r *run) error {
	return r.withKarpenter(ctx, func() error {
		if err := r.useAgents(ctx, agents); err != nil {
			return err
		}
		if err := r.switchOver(ctx); err != nil {
			return err
		}
		return r.useAgents(ctx, 1)
	})
}

func (r *run) switchOver(ctx context.Context) error {
	fleet := &fleet{
		groups: []*group{{name: "east", own: 2}, {name: "west"}}, pool: "move",
		hub: manifests.MoveHub, spoke: []string{manifests.MoveSpoke, manifests.MoveWorkload},
	}
	if err := r.settleFleet(ctx, fleet); err != nil {
		return err
	}
	if err := r.runPods(ctx, map[string]int32{"east": switched, "west": switched}); err != nil {
		return err
	}
	if err := r.rest(ctx); err != nil {
		return err
	}
	left, err := r.leave(ctx)
	if err != nil {
		return fmt.Errorf("making what the other provider leaves: %w", err)
	}
	watching, err := bystander.Watch(ctx, r.Env)
	if err != nil {
		return err
	}
	defer watching.Stop()
	if err := r.takeOver(ctx, left, watching); err != nil {
		return err
	}
	if incidents := lo.Reject(watching.Incidents(), func(what string, _ int) bool { return left.mayGo(what) }); len(incidents) > 0 {
		r.row.Innocent += len(incidents)
		return fmt.Errorf("%d things happened to what ran in the spoke, such as: %s", len(incidents), incidents[0])
	}
	// Two Nodes are empty, and are removed once the user allows it.
	if err := migration.AllowDisruption(ctx, r.Env); err != nil {
		return err
	}
	if err := r.runPods(ctx, map[string]int32{"east": 0, "west": 0}); err != nil {
		return err
	}
	if err := r.rest(ctx); err != nil {
		return err
	}
	return r.razeFleet(ctx, fleet)
}

// leavings are what the other provider has left behind.
type leavings struct {
	// machines are the Machines of the NodeClaims, by name, with the NodeClaims' names and UIDs.
	machines map[string]types.NamespacedName
	// second is a NodeClaim on the Machine of another NodeClaim.
	second *karpenterv1.NodeClaim
	// going are the names of the NodeClaims that it was terminating and of their Nodes, and of
	// second once the scenario deletes it.
	going []string
}

// mayGo reports whether an incident concerns something that was already being removed.
func (l *leavings) mayGo(incident string) bool {
	return lo.SomeBy(l.going, func(name string) bool { return strings.Contains(incident, " "+name+" ") })
}

// leave stops agents and shim, and changes their state into what the other provider would have left
// in the middle of scaling up and down.
func (r *run) leave(ctx context.Context) (*leavings, error) {
	before, err := invariants.Read(ctx, r.Hub, r.Spoke, testenv.Cluster)
	if err != nil {
		return nil, err
	}
	for _, component := range append([]string{sandbox.Shim}, lo.Times(agents, sandbox.AgentName)...) {
		if err := r.Sandbox.StopComponent(component); err != nil {
			return nil, err
		}
	}
	for i := range before.Claims {
		r.watched.excuse(before.Claims[i].Spec.ClaimID)
	}
	if err := migration.Strip(ctx, r.Env); err != nil {
		return nil, err
	}
	l := &leavings{machines: map[string]types.NamespacedName{}}
	nodeClaims := lo.KeyBy(before.NodeClaims, func(n karpenterv1.NodeClaim) string { return string(n.UID) })
	models := map[string]*karpenterv1.NodeClaim{}
	for i := range before.Claims {
		c := &before.Claims[i]
		if nc, lives := nodeClaims[c.Spec.ClaimID]; lives && c.Status.Machine != nil {
			l.machines[c.Status.Machine.Name] = types.NamespacedName{Name: nc.Name, Namespace: string(nc.UID)}
			models[c.Spec.NodeGroup] = &nc
		}
	}
	add := func(name, group string, change func(*clusterv1.Machine) func(*karpenterv1.NodeClaim)) (*karpenterv1.NodeClaim, *clusterv1.Machine, error) {
		m, err := migration.AnotherMachine(ctx, r.Env, group)
		if err != nil {
			return nil, nil, err
		}
		nc, err := migration.AddNodeClaim(ctx, r.Env, models[group], name, m, change(m))
		return nc, m, err
	}
	for i := range unfinished {
		begun, m, err := add(fmt.Sprintf("begun-%d", i), "west", migration.NotLaunched)
		if err != nil {
			return nil, err
		}
		l.machines[m.Name] = types.NamespacedName{Name: begun.Name, Namespace: string(begun.UID)}
		leaving, m, err := add(fmt.Sprintf("leaving-%d", i), "east", func(*clusterv1.Machine) func(*karpenterv1.NodeClaim) { return migration.Terminating })
		if err != nil {
			return nil, err
		}
		l.going = append(l.going, leaving.Name, m.Name)
		if err := r.Spoke.Delete(ctx, leaving); err != nil {
			return nil, err
		}
	}
	if _, err := migration.AnotherMachine(ctx, r.Env, "east"); err != nil { // forgotten, and therefore the user's from now on
		return nil, err
	}
	r.intent.share("east", 1, 0)
	shared := before.Claims[0].Status.Machine.Name
	var m clusterv1.Machine
	if err := r.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: shared}, &m); err != nil {
		return nil, err
	}
	l.second, err = migration.AddNodeClaim(ctx, r.Env, models[before.Claims[0].Spec.NodeGroup], "second", &m, func(*karpenterv1.NodeClaim) {})
	if err != nil {
		return nil, err
	}
	// Two more pods than it has begun NodeClaims for, and two Nodes without a pod.
	if err := r.scalePods(ctx, map[string]int32{"east": switched - 2, "west": switched + unfinished + 2}); err != nil {
		return nil, err
	}
	bounded, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	return l, testenv.Poll(bounded, func(context.Context) (string, error) {
		is := r.Recorder.State().Pods
		return lo.Ternary(is.Running == 2*switched-2 && is.Total() == podsThen, "", "the pods of two Nodes to go, and others to be made"), nil
	})
}

// podsThen is the number of pods from the switch on.
const podsThen = 2*switched + unfinished

// takeOver starts agents and shim and waits until each NodeClaim has its previous Machine.
func (r *run) takeOver(ctx context.Context, l *leavings, watching *bystander.Bystander) error {
	waiting, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	began := time.Now()
	if err := r.useAgents(waiting, agents); err != nil {
		return err
	}
	if err := r.Sandbox.StartComponent(waiting, sandbox.Shim); err != nil {
		return err
	}
	stop := r.killing(ctx, time.Second, 5*time.Second, append([]string{sandbox.Shim}, lo.Times(agents, sandbox.AgentName)...)...)
	err := r.outage(ctx)
	if err == nil {
		err = wait(ctx, max(0, switchFor-time.Since(began)))
	}
	stop()
	if err != nil {
		return err
	}
	over := time.Now()
	bounded, cancelAdopted := context.WithTimeout(ctx, settleWithin)
	defer cancelAdopted()
	if err := testenv.Poll(bounded, func(ctx context.Context) (string, error) { return r.missing(ctx, l) }); err != nil {
		r.row.Unsettled++
		return err
	}
	r.row.Notes = append(r.row.Notes,
		fmt.Sprintf("%d nodes were adopted, the last at most %.0f s after the last kill", len(l.machines), time.Since(over).Seconds()))
	about := func(what string) bool { return strings.Contains(what, " "+l.second.Name+" ") }
	if what, found := lo.Find(watching.Incidents(), about); found {
		r.row.Innocent++
		return fmt.Errorf("the second NodeClaim on a Machine was not left alone: %s", what)
	}
	l.going = append(l.going, l.second.Name) // from now on
	// This follows the instructions in the event.
	ofItsOwn := fmt.Appendf(nil, `{"status":{"providerID":"capi-claim://%s/%s/%s"}}`, sandbox.ClusterNamespace, sandbox.ClusterName, l.second.UID)
	if err := r.Spoke.Status().Patch(ctx, l.second, client.RawPatch(types.MergePatchType, ofItsOwn)); err != nil {
		return err
	}
	if err := client.IgnoreNotFound(r.Spoke.Delete(ctx, l.second)); err != nil {
		return err
	}
	if err := r.awaitPods(ctx, podsThen); err != nil {
		return err
	}
	return r.rest(ctx)
}

// outage suspends the hub's API server for a while.
func (r *run) outage(ctx context.Context) error {
	if err := wait(ctx, between(time.Second, 6*time.Second)); err != nil {
		return err
	}
	r.fault("%s is suspended", sandbox.HubAPIServer)
	if err := r.Sandbox.Suspend(sandbox.HubAPIServer); err != nil {
		return err
	}
	err := wait(ctx, hubAway)
	if resumed := r.Sandbox.Resume(sandbox.HubAPIServer); resumed != nil {
		return resumed
	}
	r.journal.add("%s is resumed", sandbox.HubAPIServer)
	return err
}

// missing returns which NodeClaim does not have its own Machine yet. It returns "" once each has,
// and those being removed are gone.
func (r *run) missing(ctx context.Context, l *leavings) (string, error) {
	state, err := invariants.Read(ctx, r.Hub, r.Spoke, testenv.Cluster)
	if err != nil {
		return "", err
	}
	bound := map[string]string{}
	for i := range state.Claims {
		if c := &state.Claims[i]; c.CurrentPhase() == agentv1.PhaseBound && c.Status.Machine != nil {
			bound[c.Spec.ClaimID] = c.Status.Machine.Name
		}
	}
	for machine, of := range l.machines {
		if bound[of.Namespace] != machine {
			return fmt.Sprintf("NodeClaim %s to have Machine %s: it has %q", of.Name, machine, bound[of.Namespace]), nil
		}
	}
	going, found := lo.Find(state.NodeClaims, func(n karpenterv1.NodeClaim) bool { return strings.HasPrefix(n.Name, "leaving-") })
	if found {
		return "NodeClaim " + going.Name + " to go", nil
	}
	node, found := lo.Find(state.Nodes, func(n corev1.Node) bool { return lo.Contains(l.going, n.Name) })
	return lo.Ternary(found, "Node "+node.Name+" to go", ""), nil
}
