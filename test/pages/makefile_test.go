package pages_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A pattern that matches no test passes.
func TestTestsThatRunWithoutTheRaceDetectorExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	require.NoError(t, err)
	names := regexp.MustCompile(`(?m)^UNRACED +:= \^\(([\w|]+)\)\$\$$`).FindSubmatch(text)
	folders := regexp.MustCompile(`(?m)^UNRACED_IN := (.+)$`).FindSubmatch(text)
	require.NotNil(t, names)
	require.NotNil(t, folders)
	var tests strings.Builder
	for folder := range strings.FieldsSeq(string(folders[1])) {
		files, err := filepath.Glob(filepath.Join(root(t), folder, "*_test.go"))
		require.NoError(t, err)
		for _, file := range files {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			tests.Write(source)
		}
	}
	for name := range strings.SplitSeq(string(names[1]), "|") {
		require.Contains(t, tests.String(), "\nfunc "+name+"(t *testing.T)")
	}
}

// The short form of the end-to-end tests leaves none out, and brings up no sandbox for tests that skip themselves.
func TestTheShortEndToEndTestsAreListed(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	require.NoError(t, err)
	listed := regexp.MustCompile(`(?m)^SHORT_E2E := ((?:.*\\\n)*.*)$`).FindSubmatch(text)
	require.NotNil(t, listed)

	functions := map[string]*ast.FuncDecl{}
	files, err := filepath.Glob(filepath.Join(root(t), "test/e2e/*_test.go"))
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

// skipsWhenShort reports whether a function skips its test in the short form, whatever else it does.
func skipsWhenShort(function *ast.FuncDecl) bool {
	for _, statement := range function.Body.List {
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
