package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// run runs the command, and returns what it prints.
func run(t *testing.T, arguments ...string) (said string, err error) {
	t.Helper()
	var out strings.Builder
	command := newCommand()
	command.SetArgs(arguments)
	command.SetOut(&out)
	command.SetErr(&out)
	err = command.ExecuteContext(t.Context())
	return out.String(), err
}

func TestMistakesOnTheCommandLineAreNamed(t *testing.T) {
	for arguments, says := range map[string]string{
		"remove":                    `unknown command "remove" for "capi-agent"`,
		"--nonsense":                "unknown flag: --nonsense",
		"--log-level=loud":          "--log-level",
		"uninstall everything":      `unknown command "everything" for "capi-agent uninstall"`,
		"uninstall --timeout=0s":    "--timeout: 0s is not above 0",
		"uninstall --clusters=fool": "--clusters",
	} {
		said, err := run(t, strings.Fields(arguments)...)
		require.ErrorContains(t, err, says, arguments)
		require.Empty(t, said, arguments)
	}
}

func TestAFlagWinsOverItsVariable(t *testing.T) {
	t.Setenv("CAPI_AGENT_LOG_LEVEL", "loud")
	_, err := run(t)
	require.ErrorContains(t, err, `--log-level: "loud"`)
	t.Setenv("CAPI_AGENT_HELP", "true") // is no option
	_, err = run(t, "--log-level=louder")
	require.ErrorContains(t, err, `--log-level: "louder"`)
}

func TestHelpNamesTheCommandsAndTheFlags(t *testing.T) {
	said, err := run(t, "--help")
	require.NoError(t, err)
	for _, name := range []string{"onboard", "offboard", "policy", "uninstall", "completion", "--listen-address"} {
		require.Contains(t, said, name)
	}
	require.NotContains(t, said, "metrics-docs")
	said, err = run(t, "--version")
	require.NoError(t, err)
	require.NotEmpty(t, strings.TrimSpace(said))
}

func TestAnErrorIsOneLineOfTheLogWithoutAStack(t *testing.T) {
	for _, format := range []string{options.LogJSON, options.LogConsole} {
		var out strings.Builder
		newLogger(&options.Options{LogLevel: options.LogInfo, LogFormat: format}, &out).Error(errors.New("a cause"), "it fails")
		require.Len(t, strings.Split(strings.TrimSpace(out.String()), "\n"), 1, out.String())
		require.Contains(t, out.String(), "a cause")
		require.NotContains(t, out.String(), "TestAnErrorIsOneLine")
	}
}
