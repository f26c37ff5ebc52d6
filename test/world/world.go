// Package world is a running sandbox with what tests and the demo need around it: clients that know every kind, a recorder
// of what happens, a checker of what must hold.
package world

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/karpenter/pkg/apis"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/journey"
)

// pollInterval is how often an API server is asked for what no watch tells.
const pollInterval = 200 * time.Millisecond

// Cluster is the hub's name for the spoke, unless a sandbox was given another.
var Cluster = types.NamespacedName{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}

// World is a sandbox that runs. Its methods are safe for concurrent use.
type World struct {
	Sandbox *sandbox.Sandbox
	// Hub and Spoke are an administrator's clients, without a cache.
	Hub, Spoke client.Client
	Recorder   *journey.Recorder
	Checker    invariants.Checker
}

// Scheme knows every kind that occurs in a hub or a spoke.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	lo.Must0(clientgoscheme.AddToScheme(scheme))
	lo.Must0(clusterv1.AddToScheme(scheme))
	lo.Must0(simv1.AddToScheme(scheme))
	lo.Must0(agentv1.AddToScheme(scheme))
	shimv1.AddToScheme(scheme)
	// Karpenter's own registration is for the global scheme only.
	gv := schema.GroupVersion{Group: apis.Group, Version: "v1"}
	scheme.AddKnownTypes(gv, &karpenterv1.NodePool{}, &karpenterv1.NodePoolList{}, &karpenterv1.NodeClaim{}, &karpenterv1.NodeClaimList{})
	metav1.AddToGroupVersion(scheme, gv)
	return scheme
}

// Start brings a sandbox up and begins to record. The context bounds the start; [World.Stop] ends it.
func Start(ctx context.Context, options sandbox.Options, onEvent func(journey.Event)) (*World, error) {
	box, err := sandbox.Start(ctx, options)
	if err != nil {
		return nil, err
	}
	w, err := around(ctx, box, box, onEvent)
	if err != nil {
		box.Stop()
		return nil, err
	}
	return w, nil
}

// OnHub returns the world of the same spoke and another hub, which w's Cluster is moved to, with that hub as its Sandbox. To stop it
// stops that hub, and should come before w is stopped. On an error the hub is left as it is.
func (w *World) OnHub(ctx context.Context, hub *sandbox.Sandbox) (*World, error) {
	return around(ctx, hub, w.Sandbox, nil)
}

// around connects to the hub of one sandbox and the spoke of another, or of the same.
func around(ctx context.Context, box, spokes *sandbox.Sandbox, onEvent func(journey.Event)) (*World, error) {
	scheme := Scheme()
	newClient := func(config *rest.Config) (client.Client, error) {
		return client.New(config, client.Options{Scheme: scheme})
	}
	hub, hubErr := newClient(box.HubConfig())
	spoke, spokeErr := newClient(spokes.SpokeConfig())
	if err := errors.Join(hubErr, spokeErr); err != nil {
		return nil, err
	}
	cluster := spokes.Cluster()
	recorder, err := journey.Record(ctx, journey.Options{
		Hub: box.HubConfig(), Spoke: spokes.SpokeConfig(), Scheme: scheme, Cluster: cluster, OnEvent: onEvent,
	})
	if err != nil {
		return nil, err
	}
	return &World{
		Sandbox: box, Hub: hub, Spoke: spoke, Recorder: recorder,
		Checker: invariants.Checker{Hub: hub, Spoke: spoke, Cluster: cluster},
	}, nil
}

// Stop ends the recording and the sandbox. Logs stay.
func (w *World) Stop() {
	w.Recorder.Stop()
	w.Sandbox.Stop()
}

// Scale sets how many pods a Deployment of the spoke has.
func (w *World) Scale(ctx context.Context, name types.NamespacedName, replicas int32) error {
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"replicas": replicas}})
	if err != nil {
		return err
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	if err := w.Spoke.Patch(ctx, deployment, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("scaling %s to %d: %w", name, replicas, err)
	}
	return nil
}

// Poll asks again and again until the condition says that nothing is missing. An error of the condition counts as
// something that is missing.
func Poll(ctx context.Context, condition func(context.Context) (missing string, err error)) error {
	var missing string
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		now, err := condition(ctx)
		switch {
		case err == nil:
			missing = now
		case missing == "" || !timeIsUp(err): // which must not hide what was seen before
			missing = err.Error()
		}
		return err == nil && missing == "", nil
	})
	if err != nil {
		return fmt.Errorf("still waiting for %s: %w", missing, context.Cause(ctx))
	}
	return nil
}

// timeIsUp: the clients' rate limiter says so in text only.
func timeIsUp(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "would exceed context deadline")
}

// AwaitNodePool waits until a NodePool, and with it its NodeClass, is ready.
func (w *World) AwaitNodePool(ctx context.Context, name string) error {
	return Poll(ctx, func(ctx context.Context) (string, error) {
		var pool karpenterv1.NodePool
		if err := w.Spoke.Get(ctx, client.ObjectKey{Name: name}, &pool); err != nil {
			return "", err
		}
		var class shimv1.ClusterAPINodeClass
		if err := w.Spoke.Get(ctx, client.ObjectKey{Name: pool.Spec.Template.Spec.NodeClassRef.Name}, &class); err != nil {
			return "", err
		}
		if ready := class.StatusConditions().Root(); !ready.IsTrue() {
			return fmt.Sprintf("ClusterAPINodeClass %s to be Ready (%s: %s)", class.Name, ready.Reason, ready.Message), nil
		}
		if ready := pool.StatusConditions().Root(); !ready.IsTrue() {
			return fmt.Sprintf("NodePool %s to be Ready (%s: %s)", name, ready.Reason, ready.Message), nil
		}
		return "", nil
	})
}

// AwaitRestarted waits until a component that was killed runs again as another process and is ready.
func (w *World) AwaitRestarted(ctx context.Context, component string, pid int) error {
	return Poll(ctx, func(context.Context) (string, error) {
		status := w.Status(component)
		if status.PID == pid || !status.Ready {
			return component + " to be started again", nil
		}
		return "", nil
	})
}

// Status returns what is known of a component; the zero value if there is none.
func (w *World) Status(component string) sandbox.ComponentStatus {
	status, _ := lo.Find(w.Sandbox.State().Components, func(c sandbox.ComponentStatus) bool { return c.Name == component })
	return status
}

// Pending lists the pods that have no Node, with what the scheduler says of them.
func (w *World) Pending(ctx context.Context) ([]string, error) {
	var pods corev1.PodList
	if err := w.Spoke.List(ctx, &pods); err != nil {
		return nil, err
	}
	return lo.FilterMap(pods.Items, func(p corev1.Pod, _ int) (string, bool) {
		why, _ := lo.Find(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled })
		return fmt.Sprintf("%s/%s: %s", p.Namespace, p.Name, why.Message), p.Spec.NodeName == "" && p.DeletionTimestamp.IsZero()
	}), nil
}
