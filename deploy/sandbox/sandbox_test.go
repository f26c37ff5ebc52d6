package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// startTimeout allows for a machine that is also busy with other work.
const startTimeout = 3 * time.Minute

// start starts a sandbox without the agent and the shim, which these tests do not need.
func start(t *testing.T) (*sandbox.Sandbox, sandbox.Options) {
	t.Helper()
	options := sandbox.Options{Name: "test", StateDir: filepath.Join(t.TempDir(), "sandbox"), WithoutAgent: true}
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	s, err := sandbox.Start(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	if running, err := sandbox.Remnants(options); len(running) == 0 && !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a running sandbox has no processes: %v", err)
	}
	t.Cleanup(func() {
		s.Stop()
		if remnants, err := sandbox.Remnants(options); err != nil && !errors.Is(err, errors.ErrUnsupported) || len(remnants) > 0 {
			t.Errorf("left running: %v, %v", remnants, err)
		}
	})
	state := s.State()
	t.Logf("ready after %s", state.ReadyAt.Sub(state.StartedAt))
	for _, step := range state.Steps {
		t.Logf("  %-24s %s", step.Name, step.DoneAt.Sub(step.StartedAt))
	}
	return s, options
}

// eventually polls until the condition reports nothing missing.
func eventually(t *testing.T, what string, missing func(ctx context.Context) string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	began := time.Now()
	for {
		reason := missing(ctx)
		if reason == "" {
			t.Logf("%s: %s", what, time.Since(began).Round(time.Millisecond))
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %s", what, reason)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// create creates the objects of a YAML file.
func create(t *testing.T, c client.Client, file string, change func(*unstructured.Unstructured)) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(&u.Object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		change(u)
		if err := c.Create(t.Context(), u); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSandbox(t *testing.T) {
	s, options := start(t)
	hub, err := s.HubClient()
	if err != nil {
		t.Fatal(err)
	}
	spoke, err := s.SpokeClient()
	if err != nil {
		t.Fatal(err)
	}

	t.Run("a second one of the same name is refused", func(t *testing.T) {
		if _, err := sandbox.Start(t.Context(), options); !errors.Is(err, sandbox.ErrRunning) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("every listener is on loopback", func(t *testing.T) { everyListenerIsOnLoopback(t, s) })
	t.Run("both versions of Cluster API's kinds are served", func(t *testing.T) { bothVersionsAreServed(t, hub) })
	t.Run("Machines become Nodes and go again", func(t *testing.T) { machinesBecomeNodesAndGo(t, hub, spoke) })
	t.Run("failures show on the Machine", func(t *testing.T) { failuresShowOnTheMachine(t, hub) })
	t.Run("a component that is killed comes back", func(t *testing.T) { killedComponentComesBack(t, s, hub) })
}

func everyListenerIsOnLoopback(t *testing.T, s *sandbox.Sandbox) {
	t.Helper()
	for _, component := range s.State().Components {
		listeners, err := sandbox.Listeners(component.PID)
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip("sockets are known on Linux only")
		} else if err != nil {
			t.Fatal(err)
		}
		if len(listeners) == 0 {
			t.Errorf("%s listens nowhere, although its health can be asked for", component.Name)
		}
		for _, l := range listeners {
			if !l.Addr().IsLoopback() {
				t.Errorf("%s listens on %s", component.Name, l)
			}
		}
	}
}

func bothVersionsAreServed(t *testing.T, hub client.Client) {
	t.Helper()
	old := &unstructured.Unstructured{}
	old.SetGroupVersionKind(schema.GroupVersionKind{Group: clusterv1.GroupVersion.Group, Version: "v1beta1", Kind: "Cluster"})
	if err := hub.Get(t.Context(), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}, old); err != nil {
		t.Fatal(err)
	}
	// This field is only set by the conversion.
	if ready, _, _ := unstructured.NestedBool(old.Object, "status", "controlPlaneReady"); !ready {
		t.Errorf("v1beta1 shows status %v", old.Object["status"])
	}
}

func machinesBecomeNodesAndGo(t *testing.T, hub, spoke client.Client) {
	t.Helper()
	create(t, hub, "examples/machinedeployment.yaml", func(u *unstructured.Unstructured) {
		if u.GetKind() == "MachineDeployment" {
			_ = unstructured.SetNestedField(u.Object, int64(2), "spec", "replicas")
		}
	})
	template := &simv1.SimMachineTemplate{}
	eventually(t, "the template announces its capacity", func(ctx context.Context) string {
		if err := hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: "standard-4"}, template); err != nil {
			return err.Error()
		}
		if template.Status.Capacity.Cpu().Cmp(resource.MustParse("4")) != 0 || template.Status.NodeInfo.Architecture != "amd64" {
			return "status is missing"
		}
		return ""
	})

	machines := &clusterv1.MachineList{}
	eventually(t, "two Machines run", func(ctx context.Context) string {
		if err := hub.List(ctx, machines, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return err.Error()
		}
		running := 0
		for _, m := range machines.Items {
			if m.Spec.ProviderID == "sim://spoke/"+m.Name && m.Status.NodeRef.Name == m.Name &&
				meta.IsStatusConditionTrue(m.Status.Conditions, clusterv1.MachineNodeHealthyCondition) {
				running++
			}
		}
		if running != 2 || len(machines.Items) != 2 {
			return "not all of them have a healthy Node"
		}
		return ""
	})
	for _, m := range machines.Items {
		node := &corev1.Node{}
		if err := spoke.Get(t.Context(), client.ObjectKey{Name: m.Name}, node); err != nil {
			t.Fatal(err)
		}
		unregistered := corev1.Taint{Key: "karpenter.sh/unregistered", Effect: corev1.TaintEffectNoExecute}
		if !slices.Contains(node.Spec.Taints, unregistered) {
			t.Errorf("Node %s has the taints %v", node.Name, node.Spec.Taints)
		}
		instance := &simv1.SimMachine{}
		if err := hub.Get(t.Context(), client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.InfrastructureRef.Name}, instance); err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(instance.Spec.NodeTaints, clusterv1.NodeUninitializedTaint) {
			t.Errorf("Node %s joined with the taints %v, and not as kubeadm's do", node.Name, instance.Spec.NodeTaints)
		}
		if slices.Contains(node.Spec.Taints, clusterv1.NodeUninitializedTaint) {
			t.Errorf("Cluster API left its taint on Node %s", node.Name)
		}
		if got, want := node.Status.Allocatable.Memory().Value(), int64(16<<30-100<<20); got != want {
			t.Errorf("Node %s has %d bytes of memory allocatable, want %d", node.Name, got, want)
		}
		if node.Labels[corev1.LabelTopologyZone] != "zone-a" || node.Labels[corev1.LabelInstanceTypeStable] != "standard-4" ||
			node.Labels[corev1.LabelHostname] != node.Name {
			t.Errorf("Node %s has the labels %v", node.Name, node.Labels)
		}
	}

	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one"},
		Spec: corev1.PodSpec{
			Containers:  []corev1.Container{{Name: "main", Image: "none"}},
			Tolerations: []corev1.Toleration{{Key: "karpenter.sh/unregistered", Operator: corev1.TolerationOpExists}},
		},
	}
	eventually(t, "a pod can be made", func(ctx context.Context) string {
		// The ServiceAccount controller must have processed the namespace.
		if err := spoke.Create(ctx, pod); err != nil {
			return err.Error()
		}
		return ""
	})
	eventually(t, "the pod runs", func(ctx context.Context) string {
		if err := spoke.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return err.Error()
		}
		if pod.Status.Phase != corev1.PodRunning || pod.Status.PodIP == "" {
			return string(pod.Status.Phase)
		}
		return ""
	})

	// Cluster API only checks every 20 s whether a Node that it drains is empty.
	if err := spoke.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pod ends", func(ctx context.Context) string {
		if err := spoke.Get(ctx, client.ObjectKeyFromObject(pod), pod); !apierrors.IsNotFound(err) {
			return "the pod is left"
		}
		return ""
	})
	scale(t, hub, "standard-4", 0)
	eventually(t, "Machines, instances and Nodes are gone", func(ctx context.Context) string {
		for _, list := range []struct {
			from client.Client
			what client.ObjectList
		}{{hub, &clusterv1.MachineList{}}, {hub, &simv1.SimMachineList{}}, {spoke, &corev1.NodeList{}}} {
			if err := list.from.List(ctx, list.what); err != nil {
				return err.Error()
			}
			if n := meta.LenList(list.what); n > 0 {
				return "something is left"
			}
		}
		return ""
	})
}

// failuresShowOnTheMachine uses the existing MachineDeployment, scaled to zero.
func failuresShowOnTheMachine(t *testing.T, hub client.Client) {
	t.Helper()
	template := &simv1.SimMachineTemplate{}
	if err := hub.Get(t.Context(), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: "standard-4"}, template); err != nil {
		t.Fatal(err)
	}
	template.Spec.Template.Spec.Failure = &simv1.MachineFailure{Reason: "InsufficientCapacity", Message: "zone-a is full"}
	if err := hub.Update(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	scale(t, hub, "standard-4", 1)
	eventually(t, "the Machine says why it has no instance", func(ctx context.Context) string {
		machines := &clusterv1.MachineList{}
		if err := hub.List(ctx, machines); err != nil {
			return err.Error()
		}
		for _, m := range machines.Items {
			c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.InfrastructureReadyCondition)
			if c != nil && c.Status == metav1.ConditionFalse && c.Reason == "InsufficientCapacity" && c.Message == "zone-a is full" {
				return ""
			}
		}
		return "no Machine says so"
	})

	instances := &simv1.SimMachineList{}
	if err := hub.List(t.Context(), instances); err != nil {
		t.Fatal(err)
	}
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"failure":null}}`))
	for _, i := range instances.Items {
		if err := hub.Patch(t.Context(), &i, patch); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the instance boots once there is room", func(ctx context.Context) string {
		machines := &clusterv1.MachineList{}
		if err := hub.List(ctx, machines); err != nil {
			return err.Error()
		}
		for _, m := range machines.Items {
			if m.Status.NodeRef.IsDefined() {
				return ""
			}
		}
		return "no Machine has a Node"
	})
	scale(t, hub, "standard-4", 0)
}

func killedComponentComesBack(t *testing.T, s *sandbox.Sandbox, hub client.Client) {
	t.Helper()
	pid := func(name string) int {
		for _, c := range s.State().Components {
			if c.Name == name {
				return c.PID
			}
		}
		return 0
	}
	before := pid(sandbox.HubAPIServer)
	if err := s.Kill(sandbox.HubAPIServer); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another API server answers", func(ctx context.Context) string {
		if now := pid(sandbox.HubAPIServer); now == 0 || now == before {
			return "it is not there"
		}
		if err := hub.List(ctx, &clusterv1.ClusterList{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := s.StopComponent(sandbox.SimProvider); err != nil {
		t.Fatal(err)
	}
	if got := pid(sandbox.SimProvider); got != 0 {
		t.Errorf("a stopped component has the pid %d", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.StartComponent(ctx, sandbox.SimProvider); err != nil {
		t.Error(err)
	}
	if err := s.Kill("nobody"); err == nil {
		t.Error("a component that is not there could be killed")
	}
}

func scale(t *testing.T, hub client.Client, name string, replicas int32) {
	t.Helper()
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}}
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	if err := hub.Patch(t.Context(), md, patch); err != nil {
		t.Fatal(err)
	}
}

func TestStartSaysWhatIsNotBuilt(t *testing.T) {
	root := t.TempDir()
	_, err := sandbox.Start(t.Context(), sandbox.Options{Root: root})
	if !errors.Is(err, sandbox.ErrNotBuilt) {
		t.Fatalf("got %v", err)
	}
	if !strings.Contains(err.Error(), "make tools build") {
		t.Errorf("%q does not say what to do", err)
	}
}

func TestAStartThatIsInterruptedLeavesNothing(t *testing.T) {
	for _, cause := range []error{context.Canceled, context.DeadlineExceeded} {
		t.Run(cause.Error(), func(t *testing.T) { interrupt(t, cause) })
	}
}

func interrupt(t *testing.T, cause error) {
	t.Helper()
	options := sandbox.Options{Name: "interrupted", StateDir: filepath.Join(t.TempDir(), "sandbox"), WithoutAgent: true}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	options.OnChange = func(state sandbox.State) {
		if len(state.Components) > 1 {
			cancel(cause)
		}
	}
	_, err := sandbox.Start(ctx, options)
	if !errors.Is(err, cause) {
		t.Fatalf("got %v", err)
	}
	// The error must explain what was missing after a timeout, but not after an interruption by the
	// user.
	if explained := strings.Contains(err.Error(), "etcd was not ready"); explained != errors.Is(cause, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if remnants, err := sandbox.Remnants(options); err != nil && !errors.Is(err, errors.ErrUnsupported) || len(remnants) > 0 {
		t.Errorf("left running: %v, %v", remnants, err)
	}
	if running, err := sandbox.Running(options); running || err != nil {
		t.Errorf("running: %t, %v", running, err)
	}
	state, err := sandbox.ReadState(options)
	if err != nil || state.Phase != sandbox.Failed || state.Error == "" {
		t.Errorf("what remains is %+v, %v", state, err)
	}
}
