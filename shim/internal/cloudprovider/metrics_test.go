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

	_ "github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider" // registers the metrics
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// A rule sees no increase of a counter that appears with its first increment.
func TestAttemptsAreCountedFromZeroForEveryReason(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	reasons := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is || !strings.HasPrefix(spec.Names[0].Name, "Reason") {
			return true
		}
		value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, types.ExprString(spec.Values[0]))
		require.NoError(t, err)
		reasons++
		shimtest.Metric(t, "karpenter_capi_claims_total", map[string]string{"result": constant.StringVal(value.Value)})
		return true
	})
	require.Greater(t, reasons, 10)
}
