package driftcheck_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/expiration"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/driftcheck"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestNodeClaimsAreCheckedForWhatMayDecideAboutDrift(t *testing.T) {
	condition := func(c *v1alpha1.ClusterAPINodeClass) *status.Condition { return &c.Status.Conditions[0] }
	for name, test := range map[string]struct {
		change   func(*v1alpha1.ClusterAPINodeClass)
		concerns bool
	}{
		"a price":                         {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.Selected[0].Price = "2" }, false},
		"a group is full":                 {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.Selected[0].Available = false }, false},
		"how many are available":          {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.AvailableNodeGroups = 0 }, false},
		"a condition's message":           {func(c *v1alpha1.ClusterAPINodeClass) { condition(c).Message = "two problems" }, false},
		"the spec":                        {func(c *v1alpha1.ClusterAPINodeClass) { c.Generation++ }, true},
		"an annotation":                   {func(c *v1alpha1.ClusterAPINodeClass) { c.Annotations = map[string]string{"a": "b"} }, true},
		"another group is selected":       {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.Selected[0].Name = "fleet/b" }, true},
		"how a group rolls out":           {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.Selected[0].RolloutStrategy = "OnDelete" }, true},
		"one more group":                  {func(c *v1alpha1.ClusterAPINodeClass) { c.Status.NodeGroups++ }, true},
		"a condition turns":               {func(c *v1alpha1.ClusterAPINodeClass) { condition(c).Status = metav1.ConditionFalse }, true},
		"a condition's reason":            {func(c *v1alpha1.ClusterAPINodeClass) { condition(c).Reason = "Other" }, true},
		"the spec was taken into account": {func(c *v1alpha1.ClusterAPINodeClass) { condition(c).ObservedGeneration++ }, true},
		"it is being deleted":             {func(c *v1alpha1.ClusterAPINodeClass) { c.DeletionTimestamp = new(metav1.Now()) }, true},
	} {
		before := &v1alpha1.ClusterAPINodeClass{
			ObjectMeta: metav1.ObjectMeta{Name: "default", Generation: 1, ResourceVersion: "1"},
			Status: v1alpha1.ClusterAPINodeClassStatus{
				NodeGroups: 1, AvailableNodeGroups: 1, Selected: []v1alpha1.SelectedNodeGroup{{Name: "fleet/a", Price: "1", Available: true}},
				Conditions: []status.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Ready", ObservedGeneration: 1}},
			},
		}
		after := before.DeepCopy()
		after.ResourceVersion = "2"
		test.change(after)
		assert.Equal(t, test.concerns, driftcheck.Concerns(before, after), name)
	}
	many := &v1alpha1.ClusterAPINodeClass{Status: v1alpha1.ClusterAPINodeClassStatus{
		NodeGroups: v1alpha1.MaxSelectedNodeGroups + 1, Selected: []v1alpha1.SelectedNodeGroup{{Name: "fleet/a"}},
	}}
	others := many.DeepCopy()
	others.Status.Selected[0].Name = "fleet/b"
	assert.False(t, driftcheck.Concerns(many, others), "those of many that are listed depend on what is available")
	many.Status.NodeGroups = 45 // and ten that cannot be used are listed as well
	many.Status.Selected = lo.Times(v1alpha1.MaxSelectedNodeGroups, func(i int) v1alpha1.SelectedNodeGroup {
		return v1alpha1.SelectedNodeGroup{Name: strconv.Itoa(i)}
	})
	others = many.DeepCopy()
	others.Status.Selected[0].Name = "fleet/b"
	assert.False(t, driftcheck.Concerns(many, others), "the list is full, and may lack some")
	assert.True(t, driftcheck.Concerns(&karpv1.NodePool{}, &karpv1.NodePool{}), "of other kinds nothing is known")
}

func TestUpdatesOfANodePoolsStatusAreDropped(t *testing.T) {
	before := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Generation: 1, Annotations: map[string]string{karpv1.NodePoolHashAnnotationKey: "1"}}}
	passes := func(change func(*karpv1.NodePool)) bool {
		after := before.DeepCopy()
		change(after)
		return driftcheck.NodePoolChanged.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after})
	}
	assert.False(t, passes(func(p *karpv1.NodePool) { p.Status.Nodes = new(int64(5000)) }))
	assert.True(t, passes(func(p *karpv1.NodePool) { p.Annotations[karpv1.NodePoolHashAnnotationKey] = "2" }), "a new hash of the template")
	assert.True(t, passes(func(p *karpv1.NodePool) { p.Generation++ }))
}

func TestCoresControllerIsReplacedOrMissed(t *testing.T) {
	w := shimtest.New(t, nil)
	core := []controller.Controller{
		expiration.NewController(w.Clock, w.Kube, w.CloudProvider), disruption.NewController(w.Clock, w.Kube, w.CloudProvider),
	}
	wrapped, err := driftcheck.Wrap(core, w.CloudProvider, w.Claims)
	require.NoError(t, err)
	assert.Same(t, core[0], wrapped[0])
	assert.NotEqual(t, reflect.TypeOf(core[1]), reflect.TypeOf(wrapped[1]))
	_, err = driftcheck.Wrap(core[:1], w.CloudProvider, w.Claims)
	require.EqualError(t, err, `core has no controller "nodeclaim.disruption" of NodeClaims`)
}

// Core looks for drift when the source wakes it, and finds it, and finds its end.
func TestAMachineThatIsNotUpToDateMakesItsNodeClaimDrifted(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE}})
	w.Create(&karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	nodeClaim := w.Launched("one", func(c *karpv1.NodeClaim) {
		c.Labels = lo.Assign(c.Labels, map[string]string{karpv1.NodePoolLabelKey: "default"})
	})
	w.Provision(nodeClaim, "sim:///1")
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	require.NoError(t, claimsource.Outdated(w.Claims, 0).Start(t.Context(), queue))
	core := disruption.NewController(w.Clock, w.Kube, w.CloudProvider)
	for _, why := range []string{"a new template", "", "another template"} {
		w.Agent.OutdateMachines("default/a", why)
		request, _ := queue.Get()
		require.Equal(t, "one", request.Name)
		queue.Done(request)
		w.Get(nodeClaim)
		_, err := core.Reconcile(w.Context(), nodeClaim)
		require.NoError(t, err)
		w.Get(nodeClaim)
		drifted := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDrifted)
		require.Equal(t, why != "", drifted.IsTrue())
		if why != "" {
			require.EqualValues(t, cloudprovider.DriftMachineNotUpToDate, drifted.Reason)
		}
	}
}

// Register takes the place of core's, so it must watch what core's does.
func TestCoreStillWatchesTheSame(t *testing.T) {
	entry := reflect.ValueOf(disruption.NewController).Pointer()
	theirs, _ := runtime.FuncForPC(entry).FileLine(entry)
	require.Len(t, watched(t, theirs), 7)
	same, ours := lo.FilterReject(watched(t, "driftcheck.go"), func(call string, _ int) bool { return !strings.HasPrefix(call, "WatchesRawSource, ") })
	assert.Equal(t, watched(t, theirs), same)
	assert.Equal(t, []string{"WatchesRawSource, claimsource.Outdated(c.claims, catalogueLag)"}, ours)
}

// watched returns what the method Register of a file does with its builder, in the words of core's.
func watched(t *testing.T, file string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), filepath.FromSlash(file), nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	register, found := lo.Find(parsed.Decls, func(d ast.Decl) bool {
		function, is := d.(*ast.FuncDecl)
		return is && function.Name.Name == "Register"
	})
	require.True(t, found, file)
	ours := regexp.MustCompile(`, builder\.WithPredicates\((predicate\.Funcs\{|NodePoolChanged).*$`)
	renamed := regexp.MustCompile(`\bkarpv1\.|\bruntimecontroller\.|m\.GetClient\(\)|\bw\b`)
	var calls []string
	ast.Inspect(register, func(n ast.Node) bool {
		call, is := n.(*ast.CallExpr)
		if !is {
			return true
		}
		method, is := call.Fun.(*ast.SelectorExpr)
		if !is {
			return true
		}
		switch name := method.Sel.Name; name {
		case "Named", "For", "WithOptions", "Watches", "WatchesRawSource", "WithEventFilter", "Owns", "Complete":
			words := []string{name}
			for _, arg := range call.Args {
				words = append(words, types.ExprString(arg))
			}
			text := strings.Join(words, ", ")
			text = ours.ReplaceAllString(text, "")
			calls = append(calls, renamed.ReplaceAllStringFunc(text, func(word string) string {
				return map[string]string{
					"karpv1.": "v1.", "runtimecontroller.": "controller.", "m.GetClient()": "c.kubeClient", "w": "c",
				}[word]
			}))
		}
		return true
	})
	return calls
}
