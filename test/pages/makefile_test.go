package pages_test

import (
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
