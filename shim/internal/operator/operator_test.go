package operator_test

import (
	"go/ast"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coreoperator "sigs.k8s.io/karpenter/pkg/operator"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
)

// core returns the source file of core's own operator, which ours replaces.
func core(t *testing.T) *ast.File {
	t.Helper()
	entry := reflect.ValueOf(coreoperator.NewOperator).Pointer()
	path, _ := runtime.FuncForPC(entry).FileLine(entry)
	return parse(t, path)
}

// find calls visit with each node of the type.
func find[N ast.Node](in ast.Node, visit func(N)) {
	ast.Inspect(in, func(node ast.Node) bool {
		if typed, ok := node.(N); ok {
			visit(typed)
		}
		return true
	})
}

// as returns a node as the expected type.
func as[T any](t *testing.T, node any) T {
	t.Helper()
	typed, ok := node.(T)
	require.True(t, ok, "core's operator is written in another way: %T", node)
	return typed
}

// named returns the last part of a name, such as that of ctrl.Options.
func named(expression ast.Expr) string {
	if selector, ok := expression.(*ast.SelectorExpr); ok {
		return selector.Sel.Name
	}
	return ""
}

// If core reads by an index that is missing, it fails only at run time.
func TestEveryIndexOfCoreIsThere(t *testing.T) {
	var wanted []string
	find(core(t), func(call *ast.CallExpr) {
		if named(call.Fun) != "IndexField" {
			return
		}
		object := as[*ast.CompositeLit](t, as[*ast.UnaryExpr](t, call.Args[1]).X)
		field, err := strconv.Unquote(as[*ast.BasicLit](t, call.Args[2]).Value)
		require.NoError(t, err)
		wanted = append(wanted, named(object.Type)+" "+field)
	})
	require.NotEmpty(t, wanted)
	assert.ElementsMatch(t, wanted, lo.Map(operator.Indexes(), func(index operator.Index, _ int) string {
		return reflect.TypeOf(index.Object).Elem().Name() + " " + index.Field
	}))
}

// Everything that core sets on its manager and passes to its controllers has been reviewed. New
// settings must be reviewed, too.
func TestWhatCoreSetsIsKnown(t *testing.T) {
	var options []string
	find(core(t), func(literal *ast.CompositeLit) {
		selector, ok := literal.Type.(*ast.SelectorExpr)
		if !ok || as[*ast.Ident](t, selector.X).Name != "ctrl" || selector.Sel.Name != "Options" {
			return
		}
		for _, element := range literal.Elts {
			options = append(options, as[*ast.Ident](t, as[*ast.KeyValueExpr](t, element).Key).Name)
		}
	})
	assert.ElementsMatch(t, []string{
		"Logger", "LeaderElection", "LeaderElectionID", "LeaderElectionNamespace", "LeaderElectionResourceLock", "LeaderElectionReleaseOnCancel",
		"LeaderElectionConfig", "Metrics", "HealthProbeBindAddress", "BaseContext", "Controller",
		"LeaderElectionLabels", // for providers that set some
		"Cache",                // of Leases, which core does not read
	}, options)

	fields := lo.Map(reflect.VisibleFields(reflect.TypeFor[coreoperator.Operator]()), func(f reflect.StructField, _ int) string { return f.Name })
	assert.ElementsMatch(t, []string{
		"Manager", "KubernetesInterface", "EventRecorder", "Clock", "InstanceTypeStore", "PredictionStore",
	}, fields)

	var checks []string
	find(core(t), func(call *ast.CallExpr) {
		if name := named(call.Fun); strings.HasSuffix(name, "zCheck") {
			checks = append(checks, name+" "+as[*ast.BasicLit](t, call.Args[0]).Value)
		}
	})
	assert.ElementsMatch(t, []string{
		`AddReadyzCheck "manager"`, `AddReadyzCheck "crd"`, `AddReadyzCheck "readyz"`, `AddHealthzCheck "healthz"`,
	}, checks)
}
