// Package testenv wraps a running sandbox with what tests and the demo need: clients for every
// kind, a recorder of events, and a checker of invariants.
package testenv

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
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// pollInterval is the interval for state that no watch reports.
const pollInterval = 200 * time.Millisecond

// Cluster is the spoke's default Cluster in the hub.
var Cluster = types.NamespacedName{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}

// Env is a running sandbox. Its methods are safe for concurrent use.
type Env struct {
	Sandbox *sandbox.Sandbox
	// Hub and Spoke are an administrator's clients, without a cache.
	Hub, Spoke client.Client
	Recorder   *timeline.Recorder
	Checker    invariants.Checker
}

// Scheme returns a scheme with every kind that occurs in a hub or a spoke.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	lo.Must0(clientgoscheme.AddToScheme(scheme))
	lo.Must0(clusterv1.AddToScheme(scheme))
	lo.Must0(simv1.AddToScheme(scheme))
	lo.Must0(agentv1.AddToScheme(scheme))
	shimv1.AddToScheme(scheme)
	// Karpenter's own registration only supports the global scheme.
	gv := schema.GroupVersion{Group: apis.Group, Version: "v1"}
	scheme.AddKnownTypes(gv, &karpenterv1.NodePool{}, &karpenterv1.NodePoolList{}, &karpenterv1.NodeClaim{}, &karpenterv1.NodeClaimList{})
	metav1.AddToGroupVersion(scheme, gv)
	return scheme
}

// Start starts a sandbox and a recorder. The context only bounds the start; [Env.Stop] ends it.
func Start(ctx context.Context, options sandbox.Options, onEvent func(timeline.Event)) (*Env, error) {
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

// OnHub returns an environment with the same spoke and another hub, to which w's Cluster is moved.
// Its Sandbox is that hub. Stopping it stops that hub, and should be done before w is stopped. On
// an error the hub is left unchanged.
func (w *Env) OnHub(ctx context.Context, hub *sandbox.Sandbox) (*Env, error) {
	return around(ctx, hub, w.Sandbox, nil)
}

// around connects to the hub of one sandbox and to the spoke of the same or another one.
func around(ctx context.Context, box, spokes *sandbox.Sandbox, onEvent func(timeline.Event)) (*Env, error) {
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
	recorder, err := timeline.Record(ctx, timeline.Options{
		Hub: box.HubConfig(), Spoke: spokes.SpokeConfig(), Scheme: scheme, Cluster: cluster, OnEvent: onEvent,
	})
	if err != nil {
		return nil, err
	}
	return &Env{
		Sandbox: box, Hub: hub, Spoke: spoke, Recorder: recorder,
		Checker: invariants.Checker{Hub: hub, Spoke: spoke, Cluster: cluster},
	}, nil
}

// Stop stops the recorder and the sandbox. The logs are kept.
func (w *Env) Stop() {
	w.Recorder.Stop()
	w.Sandbox.Stop()
}

// Scale sets the number of pods of a Deployment in the spoke.
func (w *Env) Scale(ctx context.Context, name types.NamespacedName, replicas int32) error {
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

// Poll polls until the condition reports nothing missing. An error of the condition counts as
// something missing.
func Poll(ctx context.Context, condition func(context.Context) (missing string, err error)) error {
	var missing string
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		now, err := condition(ctx)
		switch {
		case err == nil:
			missing = now
		case missing == "" || !timeIsUp(err): // a timeout must not hide an earlier finding
			missing = err.Error()
		}
		return err == nil && missing == "", nil
	})
	if err != nil {
		return fmt.Errorf("still waiting for %s: %w", missing, context.Cause(ctx))
	}
	return nil
}

// timeIsUp reports whether the error is a timeout. The clients' rate limiter only reports that in
// text.
func timeIsUp(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "would exceed context deadline")
}

// AwaitNodePool waits until a NodePool, and therefore its NodeClass, is ready.
func (w *Env) AwaitNodePool(ctx context.Context, name string) error {
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

// AwaitRestarted waits until a killed component runs as a new process and is ready.
func (w *Env) AwaitRestarted(ctx context.Context, component string, pid int) error {
	return Poll(ctx, func(context.Context) (string, error) {
		status := w.Status(component)
		if status.PID == pid || !status.Ready {
			return component + " to be started again", nil
		}
		return "", nil
	})
}

// Status returns the status of a component, or the zero value if there is none.
func (w *Env) Status(component string) sandbox.ComponentStatus {
	status, _ := lo.Find(w.Sandbox.State().Components, func(c sandbox.ComponentStatus) bool { return c.Name == component })
	return status
}

// Pending returns the pods without a Node, with the scheduler's messages about them.
func (w *Env) Pending(ctx context.Context) ([]string, error) {
	var pods corev1.PodList
	if err := w.Spoke.List(ctx, &pods); err != nil {
		return nil, err
	}
	return lo.FilterMap(pods.Items, func(p corev1.Pod, _ int) (string, bool) {
		why, _ := lo.Find(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled })
		return fmt.Sprintf("%s/%s: %s", p.Namespace, p.Name, why.Message), p.Spec.NodeName == "" && p.DeletionTimestamp.IsZero()
	}), nil
}
