package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMistakesInTheOnboardingCommandsAreNamed(t *testing.T) {
	for arguments, says := range map[string]string{
		"":                      "write `capi-agent onboard NAMESPACE/CLUSTER`",
		"a/b c/d":               "write `capi-agent onboard NAMESPACE/CLUSTER`",
		"production":            `"production" is not <namespace>/<name> of a Cluster`,
		"--issuer-secret=x ":    "write `capi-agent onboard NAMESPACE/CLUSTER`",
		"--issuer-secret=x a/b": "--issuer-secret: \"x\" is not <namespace>/<name> of a secret",
		"--secret=x a/b":        "--secret: \"x\" is not <namespace>/<name> of a secret",
		"--valid-for=1s a/b":    "--valid-for: 1s is below 1m",
		"--spoke-context=x a/b": "--spoke-context: has no effect without --spoke-kubeconfig",
		"--cluster-resource-set --spoke-kubeconfig=/nofile a/b": "--cluster-resource-set: excludes --spoke-kubeconfig",
		"--server-ca-file=/nofile a/b":                          "--server-ca-file:",
		"--kubeconfig=/nofile a/b":                              "--kubeconfig:",
		"--nonsense":                                            "unknown flag",
	} {
		said, err := run(t, append([]string{"onboard"}, strings.Fields(arguments)...)...)
		require.ErrorContains(t, err, says, arguments)
		require.Empty(t, said)
	}
	for arguments, says := range map[string]string{
		"":                         "write `capi-agent offboard NAMESPACE/CLUSTER`",
		"--kubeconfig=/nofile a/b": "--kubeconfig:",
		"--kubeconfig=/nofile a":   `"a" is not <namespace>/<name> of a Cluster`,
	} {
		_, err := run(t, append([]string{"offboard"}, strings.Fields(arguments)...)...)
		require.ErrorContains(t, err, says, arguments)
	}
}
