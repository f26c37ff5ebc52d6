package cloudprovider_test

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	_ "github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider" // registers the metrics
)

// atStart are the metrics before any test has run.
var atStart, _ = crmetrics.Registry.Gather()

// A rule sees no increase of a counter that appears with its first increment.
func TestAttemptsAreCountedFromZeroForEveryReason(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	reasons := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is || !strings.HasPrefix(spec.Names[0].Name, "Reason") {
			return true
		}
		value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, types.ExprString(spec.Values[0]))
		require.NoError(t, err)
		reasons[constant.StringVal(value.Value)] = true
		return true
	})
	require.Greater(t, len(reasons), 10)
	counted := 0
	for _, family := range atStart {
		if family.GetName() != "karpenter_capi_claims_total" {
			continue
		}
		for _, series := range family.GetMetric() {
			counted++
			require.Zero(t, series.GetCounter().GetValue())
			delete(reasons, series.GetLabel()[0].GetValue())
		}
	}
	require.NotZero(t, counted)
	require.Empty(t, reasons)
}
