package operator_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coreoperator "sigs.k8s.io/karpenter/pkg/operator"
)

const corePackages = "sigs.k8s.io/karpenter/pkg/"

// sources returns the Go files of core that match a pattern, relative to its module.
func sources(t *testing.T, pattern string) []*ast.File {
	t.Helper()
	entry := reflect.ValueOf(coreoperator.NewOperator).Pointer()
	file, _ := runtime.FuncForPC(entry).FileLine(entry)
	paths, err := filepath.Glob(filepath.Join(filepath.Dir(file), "..", "..", filepath.FromSlash(pattern)))
	require.NoError(t, err)
	paths = lo.Reject(paths, func(p string, _ int) bool { return strings.HasSuffix(p, "_test.go") })
	require.NotEmpty(t, paths, "core has no %s", pattern)
	return lo.Map(paths, func(p string, _ int) *ast.File { return parse(t, p) })
}

func parse(t *testing.T, file string) *ast.File {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	return parsed
}

// calls returns the arguments of the calls of functions of core's packages, by package and name.
func calls(t *testing.T, file *ast.File) map[string][]string {
	t.Helper()
	imported := map[string]string{}
	for _, spec := range file.Imports {
		of, err := strconv.Unquote(spec.Path.Value)
		require.NoError(t, err)
		name := path.Base(of)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		if within, is := strings.CutPrefix(of, corePackages); is {
			imported[name] = within
		}
	}
	all := map[string][]string{}
	find(file, func(call *ast.CallExpr) {
		selector, is := call.Fun.(*ast.SelectorExpr)
		if !is {
			return
		}
		if of, is := imported[types.ExprString(selector.X)]; is {
			all[of+"."+selector.Sel.Name] = lo.Map(call.Args, func(arg ast.Expr, _ int) string { return types.ExprString(arg) })
		}
	})
	return all
}

// Core's own main is the only description of what a provider's main has to make, and to pass on.
// What a new release of core makes or passes in addition fails here, and must be reviewed.
func TestWhatCoresMainMakesAndPassesIsMadeAndPassed(t *testing.T) {
	ours, cores := calls(t, parse(t, filepath.FromSlash("../../cmd/karpenter/main.go"))), calls(t, sources(t, "kwok/main.go")[0])
	require.Contains(t, cores, "controllers.NewControllers")
	// What the names in core's main are in ours.
	names := strings.NewReplacer("overlayUndecoratedCloudProvider", "undecorated", "cloudProvider", "decorated", "repairPolicyMatcher", "repairPolicies")
	for function, args := range cores {
		if function == "operator.NewOperator" {
			continue // replaced by this package
		}
		want := lo.Map(args, func(arg string, _ int) string { return names.Replace(arg) })
		if function == "controllers.NewControllers" {
			require.Equal(t, "op.GetClient()", want[3])
			require.Equal(t, "op.EventRecorder", want[4])
			want[4] = "registration.CoreRecorder(op.EventRecorder, nodePoolExists(ctx, op.GetClient()))"
			want[3] = "registration.PlanningClient(failed.Client(static.Client(outage.Client(op.GetClient(), nodeGroups, op.Clock))))"
			want = append(want, "controllers.WithRegistrationHook(registration.NewLabels(op.GetClient(), catalogue))")
		}
		assert.Equal(t, want, ours[function], function)
	}
}

// A provider need not use an option, but must know it.
func TestOptionsOfCoreAreKnown(t *testing.T) {
	for pattern, known := range map[string][]string{
		"pkg/controllers/*.go": {
			"WithRegistrationHook",
			"WithoutVPAPrediction", // for providers with predictions of their own
		},
		"pkg/controllers/state/*.go": {"WithRepairPolicyMatcher"},
		"pkg/operator/*.go": { // of the operator that this package replaces
			"WithLeaderElectionConfig", "WithLeaderElectionLabels",
		},
	} {
		var options []string
		for _, file := range sources(t, pattern) {
			find(file, func(function *ast.FuncDecl) {
				if function.Recv != nil || !function.Name.IsExported() || function.Type.Results == nil {
					return
				}
				if strings.HasPrefix(types.ExprString(function.Type.Results.List[0].Type), "option.Function[") {
					options = append(options, function.Name.Name)
				}
			})
		}
		assert.ElementsMatch(t, known, options, pattern)
	}
}
