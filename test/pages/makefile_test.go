package pages_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
)

// A pattern that matches no test passes, and so does a test that skips itself.
func TestTestsThatRunWithoutTheRaceDetectorExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	require.NoError(t, err)
	names := regexp.MustCompile(`(?m)^UNRACED +:= \^\(([\w|]+)\)\$\$$`).FindSubmatch(text)
	folders := regexp.MustCompile(`(?m)^UNRACED_IN := (.+)$`).FindSubmatch(text)
	require.NotNil(t, names)
	require.NotNil(t, folders)
	var listed, skipping []string
	for folder := range strings.FieldsSeq(string(folders[1])) {
		for name, function := range functionsIn(t, folder) {
			if !strings.HasPrefix(name, "Test") {
				continue
			}
			if slices.Contains(strings.Split(string(names[1]), "|"), name) {
				listed = append(listed, name)
			}
			if skipsWhenRaced(function) {
				skipping = append(skipping, name)
			}
		}
	}
	require.ElementsMatch(t, strings.Split(string(names[1]), "|"), listed)
	require.ElementsMatch(t, listed, skipping, "no others skip themselves under the race detector: they would run nowhere")
}

// skipsWhenRaced reports whether a test skips itself under the race detector.
func skipsWhenRaced(function *ast.FuncDecl) bool {
	skips := false
	ast.Inspect(function.Body, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.CallExpr:
			called, is := n.Fun.(*ast.Ident)
			skips = skips || is && called.Name == "inOneGoroutine"
		case *ast.IfStmt:
			condition, is := n.Cond.(*ast.Ident)
			skips = skips || is && condition.Name == "raced"
		}
		return true
	})
	return skips
}

// functionsIn returns the functions of the tests of a package by name.
func functionsIn(t *testing.T, folder string) map[string]*ast.FuncDecl {
	t.Helper()
	functions := map[string]*ast.FuncDecl{}
	files, err := filepath.Glob(filepath.Join(root(t), folder, "*_test.go"))
	require.NoError(t, err)
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, declared := range parsed.Decls {
			if function, is := declared.(*ast.FuncDecl); is && function.Recv == nil {
				functions[function.Name.Name] = function
			}
		}
	}
	return functions
}

// The short form of the end-to-end tests leaves none out, and brings up no sandbox for tests that skip themselves.
func TestTheShortEndToEndTestsAreListed(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	require.NoError(t, err)
	listed := regexp.MustCompile(`(?m)^SHORT_E2E := ((?:.*\\\n)*.*)$`).FindSubmatch(text)
	require.NotNil(t, listed)

	functions := functionsIn(t, "test/e2e")
	var short []string
	for name, function := range functions {
		if !strings.HasPrefix(name, "Test") || name == "TestMain" || skipsWhenShort(function) {
			continue
		}
		skips := false
		ast.Inspect(function.Body, func(node ast.Node) bool {
			if call, is := node.(*ast.CallExpr); is {
				if called, is := call.Fun.(*ast.Ident); is && functions[called.Name] != nil && skipsWhenShort(functions[called.Name]) {
					skips = true
				}
			}
			return true
		})
		if !skips {
			short = append(short, name)
		}
	}
	require.ElementsMatch(t, short, strings.Fields(strings.ReplaceAll(string(listed[1]), "\\\n", " ")))
}

// skipsWhenShort reports whether a function skips its test, or each of its subtests, in the short form,
// whatever else it does.
func skipsWhenShort(function *ast.FuncDecl) bool {
	if skips(function.Body) {
		return true
	}
	subtests, skipped := 0, 0
	ast.Inspect(function.Body, func(node ast.Node) bool {
		if call, is := node.(*ast.CallExpr); is && calls(call, "t", "Run") {
			if body, is := call.Args[1].(*ast.FuncLit); is {
				subtests++
				skipped += lo.Ternary(skips(body.Body), 1, 0)
			}
		}
		return true
	})
	return subtests > 0 && skipped == subtests
}

// skips reports whether one of the statements skips the test if it is the short form.
func skips(body *ast.BlockStmt) bool {
	for _, statement := range body.List {
		condition, is := statement.(*ast.IfStmt)
		if !is || !calls(condition.Cond, "testing", "Short") {
			continue
		}
		for _, inner := range condition.Body.List {
			if expression, is := inner.(*ast.ExprStmt); is && calls(expression.X, "t", "Skip") {
				return true
			}
		}
	}
	return false
}

// calls reports whether an expression is a call of that function or method.
func calls(expression ast.Expr, of, name string) bool {
	call, is := expression.(*ast.CallExpr)
	if !is {
		return false
	}
	selected, is := call.Fun.(*ast.SelectorExpr)
	if !is || selected.Sel.Name != name {
		return false
	}
	from, is := selected.X.(*ast.Ident)
	return is && from.Name == of
}
