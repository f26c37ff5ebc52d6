package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
)

func TestMistakesNameTheirFlag(t *testing.T) {
	for want, arguments := range map[string][]string{
		"--address: write the":                          {"--cluster=a/b"},
		`--cluster: "a" is not namespace/name`:          {"--address=x", "--cluster=a"},
		`--profiles: "writer" is not one of`:            {"--address=x", "--cluster=a/b", "--profiles=writer"},
		"--only: error parsing regexp":                  {"--address=x", "--cluster=a/b", "--only=("},
		"--patience: 0s is not positive":                {"--address=x", "--cluster=a/b", "--patience=0s"},
		"--admin-cert-file and --admin-key-file belong": {"--address=x", "--cluster=a/b", "--admin-cert-file=a"},
		"--control: it makes Clusters":                  {"--address=x", "--cluster=a/b", "--control=http://127.0.0.1:1"},
		"and the files of all certificates": {
			"--address=x", "--control=http://127.0.0.1:1", "--admin-cert-file=a", "--admin-key-file=b",
		},
		`"nowhere" is not the URL of a control`: {"--address=x", "--control=nowhere"},
		"control: Post":                         {"--address=x", "--control=http://127.0.0.1:1"},
		"address 192.0.2.1:1 needs TLS":         {"--address=192.0.2.1:1", "--cluster=a/b"},
		"asking the agent who the caller is":    {"--address=127.0.0.1:1", "--plaintext-loopback", "--cluster=a/b"},
		"unknown flag: --nonsense":              {"--nonsense"},
		`"127.0.0.1:1" is not a flag`:           {"127.0.0.1:1"},
	} {
		var out, errOut bytes.Buffer
		require.Equal(t, unchecked, run(t.Context(), arguments, &out, &errOut), "%v", arguments)
		require.Contains(t, errOut.String(), want, "%v", arguments)
	}
}

func TestTheListIsTheTable(t *testing.T) {
	var out bytes.Buffer
	require.Equal(t, conforms, run(t.Context(), []string{"--list"}, &out, &out))
	require.Equal(t, conformance.Table(), out.String())
}

func TestAVerdictThatCannotBeWrittenIsStillShown(t *testing.T) {
	require.Error(t, writeFile(filepath.Join(t.TempDir(), "missing", "verdict"), conformance.Verdict{}.WriteJSON))
	file := filepath.Join(t.TempDir(), "verdict.json")
	require.NoError(t, writeFile(file, conformance.Verdict{}.WriteJSON))
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(content), "{"))
}
