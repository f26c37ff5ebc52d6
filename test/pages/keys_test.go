package pages_test

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// onNoPage has the keys in the code that users neither write nor look for, each with the reason.
var onNoPage = map[string]string{
	"addons.cluster.x-k8s.io/resource-set":                              "the type of a Secret, which Cluster API defines",
	"agent.karpenter.cluster.x-k8s.io/claim-holder":                     "the agent's record on a Machine, to create a lost MachineClaim again",
	"agent.karpenter.cluster.x-k8s.io/claim-spoke":                      "the same",
	"agent.karpenter.cluster.x-k8s.io/claimed-at":                       "the agent's record on a Machine, for display",
	"agent.karpenter.cluster.x-k8s.io/handed-over-by":                   "the agent's record on a Machine",
	"agent.karpenter.cluster.x-k8s.io/node-group":                       "the agent selects MachineClaims by it; their spec has the node group",
	"agent.karpenter.cluster.x-k8s.io/released":                         "the agent's record on a MachineSet",
	"cluster.x-k8s.io/machine":                                          "karpenter-provider-cluster-api sets it, and the shim reads it",
	"karpenter.cluster.x-k8s.io/adopt-machine":                          "the shim's record on a NodeClaim",
	"karpenter.cluster.x-k8s.io/published-deletion-policy":              "the shim's record on a published object; the NodePoolSet has the policy",
	"karpenter.cluster.x-k8s.io/published-revision":                     "the shim's record on a published object",
	"karpenter.cluster.x-k8s.io/reservation":                            "Karpenter core counts reserved capacity by it; the shim sets it",
	"pre-terminate.delete.hook.machine.cluster.x-k8s.io/karpenter-capi": "earlier versions of the agent set it; this one only removes it",
}

// notInCode has the names on pages that look like keys of ours and are no constants.
var notInCode = map[string]string{
	"agent.karpenter.cluster.x-k8s.io/v1alpha1":      "an API version",
	"karpenter.cluster.x-k8s.io/v1alpha1":            "an API version",
	"karpenter.cluster.x-k8s.io/clusterapinodeclass": "a label of Nodes, which Karpenter core derives from the kind of their NodeClass",
}

var (
	// anyKey is the key of an annotation or a label, or any other name in a domain, up to its last letter or digit.
	anyKey   = regexp.MustCompile(`\b[a-z0-9][a-z0-9.-]*\.[a-z0-9-]+/[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?`)
	wholeKey = regexp.MustCompile(`^(?:` + anyKey.String() + `)$`)
	// ownKey is a key that the agent or the shim defines, or that the agent reads as the cluster-autoscaler does.
	ownKey = regexp.MustCompile(`^(?:(?:agent\.)?karpenter\.cluster\.x-k8s\.io/|capacity\.cluster-autoscaler\.kubernetes\.io/|` +
		`cluster\.x-k8s\.io/(?:autoscaling-options-|cluster-api-autoscaler-node-group-))`)
)

// A key that is added, renamed or removed in the code alone fails, and so does one that is renamed in one
// of several modules that have a constant for it. Generated pages do not count: they repeat the code's
// comments.
func TestTheKeysOfAnnotationsAndLabelsAreThoseOfThePages(t *testing.T) {
	all, err := pages.All(root(t))
	require.NoError(t, err)
	named := map[string][]string{} // pages by key
	for _, page := range all {
		if strings.HasPrefix(page.Path, "docs/") && !strings.HasPrefix(page.Text, "<!-- Generated ") {
			for _, name := range lo.Uniq(anyKey.FindAllString(page.Text, -1)) {
				named[name] = append(named[name], page.Path)
			}
		}
	}
	constants := keysInCode(t)
	require.Greater(t, len(constants), 50, "keys were found")

	var problems []string
	report := func(wrong bool, name, format string, args ...any) {
		if wrong {
			problems = append(problems, name+": "+fmt.Sprintf(format, args...))
		}
	}
	for name, declared := range constants {
		report(onNoPage[name] == "" && named[name] == nil, name, "%v has it, and no page in docs describes it", declared)
		report(onNoPage[name] != "" && named[name] != nil, name, "onNoPage has it, and so has %v", named[name])
	}
	for name, on := range named {
		report(ownKey.MatchString(name) && notInCode[name] == "" && constants[name] == nil, name, "%v has it, and no constant", on)
	}
	for name := range onNoPage {
		report(constants[name] == nil, name, "onNoPage has it, and no constant")
	}
	for name := range notInCode {
		report(named[name] == nil || constants[name] != nil, name, "notInCode need not have it")
	}
	require.Empty(t, problems, strings.Join(problems, "\n"))
}

func TestAKeyOnAPageIsFound(t *testing.T) {
	for text, found := range map[string][]string{
		"`example.com/a-b.`, and example.com/c.":                   {"example.com/a-b", "example.com/c"},
		"$ kubectl annotate node n example.com/max=2 b.example/x-": {"example.com/max", "b.example/x"},
		`annotations: {sub.example.com/maxPods: "1"}`:              {"sub.example.com/maxPods"},
		"example.com/, `after/a`, docs/claims and a/b.c":           nil,
	} {
		require.Equal(t, found, anyKey.FindAllString(text, -1), text)
	}
	declared := constantsOf(t, "package p\nconst (\n\tprefix = `example.com/`\n\tA, B = prefix + \"a-\", A + \"b\"\n\tother = 1 + x.C\n)\n")
	values := map[string]string{}
	for name, expression := range declared {
		if value := valueOf(expression, declared); value.Kind() == constant.String {
			values[name] = constant.StringVal(value)
		}
	}
	require.Equal(t, map[string]string{"prefix": "example.com/", "A": "example.com/a-", "B": "example.com/a-b"}, values)
	require.NotRegexp(t, wholeKey, values["A"], "a prefix of keys")
}

// keysInCode returns the constants that hold keys, by key, of all packages that may be part of a product.
func keysInCode(t *testing.T) map[string][]string {
	t.Helper()
	packages := map[string]map[string]ast.Expr{} // constants by package
	for _, module := range []string{"agent", "shim", "pkg"} {
		walk(t, module, ".go", func(path string) {
			if strings.HasSuffix(path, "_test.go") {
				return
			}
			folder := filepath.Dir(path)
			if packages[folder] == nil {
				packages[folder] = map[string]ast.Expr{}
			}
			source, err := os.ReadFile(filepath.Join(root(t), path))
			require.NoError(t, err)
			maps.Copy(packages[folder], constantsOf(t, string(source)))
		})
	}
	found := map[string][]string{}
	for folder, declared := range packages {
		for name, expression := range declared {
			value := valueOf(expression, declared)
			if value.Kind() == constant.String && wholeKey.MatchString(constant.StringVal(value)) {
				found[constant.StringVal(value)] = append(found[constant.StringVal(value)], folder+"."+name)
			}
		}
	}
	return found
}

// constantsOf returns the package-level constants of a file, without those that repeat the expression
// above them.
func constantsOf(t *testing.T, source string) map[string]ast.Expr {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "", source, parser.SkipObjectResolution)
	require.NoError(t, err)
	found := map[string]ast.Expr{}
	for _, declaration := range file.Decls {
		group, is := declaration.(*ast.GenDecl)
		if !is || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			if declared, is := spec.(*ast.ValueSpec); is {
				for i, expression := range declared.Values {
					found[declared.Names[i].Name] = expression
				}
			}
		}
	}
	return found
}

// valueOf returns the value of a constant expression. It is unknown if the expression has more than
// literals, sums, and constants of the same package.
func valueOf(expression ast.Expr, declared map[string]ast.Expr) constant.Value {
	switch e := expression.(type) {
	case *ast.BasicLit:
		return constant.MakeFromLiteral(e.Value, e.Kind, 0)
	case *ast.Ident:
		if other := declared[e.Name]; other != nil {
			return valueOf(other, declared)
		}
	case *ast.BinaryExpr:
		x, y := valueOf(e.X, declared), valueOf(e.Y, declared)
		if e.Op == token.ADD && x.Kind() == constant.String && y.Kind() == constant.String {
			return constant.BinaryOp(x, token.ADD, y)
		}
	}
	return constant.MakeUnknown()
}
