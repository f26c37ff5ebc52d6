package claims

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// A step reads the MachineDeployment before the claims. A user may change it in between, and a
// caller may see the change and call. The step then finds the call's claim.

// soon bounds what a test waits for.
const soon = 10 * time.Second

// beforeClaims calls meanwhile once, before the engine lists claims from the API server for the
// first time.
func beforeClaims(e *Engine, meanwhile func()) {
	var done atomic.Bool
	e.Reader = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if _, is := list.(*v1alpha1.MachineClaimList); is && done.CompareAndSwap(false, true) {
				meanwhile()
			}
			return c.List(ctx, list, opts...)
		},
	})
}

// creatingNow dates the claims that the engine makes, as the API server does.
func creatingNow(e *Engine) {
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			o.SetCreationTimestamp(metav1.NewTime(e.Clock.Now()))
			return c.Create(ctx, o, opts...)
		},
	})
}

// waitFor returns once that many calls wait for the entry of claim "a".
func waitFor(t *testing.T, g *group, calls int) {
	t.Helper()
	require.Eventually(t, func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.waiters["a"]) == calls
	}, soon, time.Millisecond)
}

func TestARefusalIsNotOlderThanTheCall(t *testing.T) {
	sized := func(most string) map[string]string {
		return map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: most}
	}
	frozen := groupOf("small", 0, map[string]string{
		v1alpha1.ReplicasLoweredAnnotation: "to 0",
		v1alpha1.LedgerAnnotation:          (&protocol.Ledger{Version: 1, Of: namespace + "/small", Seq: 1, Lowered: true}).Encode(),
	})
	outside := groupOf("small", 0, nil)
	delete(outside.Labels, v1alpha1.MemberLabel)
	for name, before := range map[string]*clusterv1.MachineDeployment{
		"the max size is raised":                 groupOf("small", 0, sized("0")),
		"a size is corrected":                    groupOf("small", 0, sized("many")),
		"the MachineDeployment is unpaused":      groupOf("small", 0, map[string]string{clusterv1.PausedAnnotation: "true"}),
		"the MachineDeployment is unfrozen":      frozen,
		"the MachineDeployment becomes a member": outside,
		"the MachineDeployment is created":       nil,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), soon)
			defer cancel()
			var objects []client.Object
			if before != nil {
				objects = append(objects, before)
			}
			e := engineWith(t, objects...)
			creatingNow(e)
			g := e.group(namespace, "small")
			answered := make(chan error, 1)
			beforeClaims(e, func() {
				after := groupOf("small", 0, sized("1"))
				after.UID = "uid"
				if before == nil {
					require.NoError(t, e.Client.Create(ctx, after))
				} else {
					if text, is := before.Annotations[v1alpha1.LedgerAnnotation]; is {
						after.Annotations[v1alpha1.LedgerAnnotation] = text
					}
					after.ResourceVersion = before.ResourceVersion
					require.NoError(t, e.Client.Update(ctx, after))
				}
				go func() {
					_, err := e.Create(ctx, Request{
						Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"small"},
					})
					answered <- err
				}()
				waitFor(t, g, 1)
			})
			_, err := g.run(ctx)
			require.NoError(t, err)
			require.NoError(t, <-answered, "the change was made before the call")
		})
	}
}

// Of two calls for one claim, the step answers the one that waited before it read anything. The
// claim is old enough for the agent to move it on, but not while the other call waits.
func TestARefusalAnswersTheCallsThatWaitedForIt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	full := groupOf("small", 0, map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: "0"})
	e := engineWith(t, full, claimIn("", "a", "", ""))
	e.spawn = func(func()) {} // the test itself runs the group
	g := e.group(namespace, "small")
	type answer struct {
		refusal *eligibility.Refusal
		err     error
	}
	enter := func() chan answer {
		answered := make(chan answer, 1)
		go func() {
			refusal, err := g.awaitEntry(ctx, "a")
			answered <- answer{refusal, err}
		}()
		return answered
	}
	early := enter()
	waitFor(t, g, 1)
	var late chan answer
	beforeClaims(e, func() {
		room := groupOf("small", 0, nil)
		room.ResourceVersion = full.ResourceVersion
		require.NoError(t, e.Client.Update(ctx, room))
		late = enter()
		waitFor(t, g, 2)
	})
	_, err := g.run(ctx)
	require.NoError(t, err)
	first := <-early
	require.NoError(t, first.err)
	require.NotNil(t, first.refusal)
	assert.Equal(t, eligibility.AtMaxSize, first.refusal.Reason)
	waitFor(t, g, 1) // not answered yet
	_, err = g.run(ctx)
	require.NoError(t, err)
	second := <-late
	require.NoError(t, second.err)
	require.Nil(t, second.refusal)
}

// A MachineDeployment that was deleted may be created again, and another agent may enter a claim
// for it, after this agent has found it missing.
func TestAMachineDeploymentThatIsCreatedMeanwhileIsNotGone(t *testing.T) {
	e := engineWith(t)
	c := claimIn("uid", "a", v1alpha1.PhasePending, "")
	beforeClaims(e, func() {
		ledger := &protocol.Ledger{
			Version: 1, Of: namespace + "/small", UID: "uid", Seq: 1, LastReplicas: 1, Pending: map[string]protocol.Assignment{"a": {}},
		}
		require.NoError(t, e.Client.Create(t.Context(), groupWith("uid", 1, ledger)))
		status := c.Status
		require.NoError(t, e.Client.Create(t.Context(), c))
		c.Status = status
		require.NoError(t, e.Client.Status().Update(t.Context(), c))
	})
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase, "%s", c.Status.Message)
}
