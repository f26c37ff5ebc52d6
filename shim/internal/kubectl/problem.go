package kubectl

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// RemediedError is an error with what to do about it.
type RemediedError struct {
	Err    error
	Remedy []string
}

func (e *RemediedError) Error() string { return e.Err.Error() }

func (e *RemediedError) Unwrap() error { return e.Err }

func problem(err error, remedy ...string) error { return &RemediedError{Err: err, Remedy: remedy} }

// RemedyOf returns what to do about an error, if that is known.
func RemedyOf(err error) []string {
	if p := new(RemediedError); errors.As(err, &p) {
		return p.Remedy
	}
	return nil
}

// Describe formats an error for a terminal: the error, then what to do.
func Describe(err error) string {
	var text strings.Builder
	fmt.Fprintf(&text, "error: %v\n", err)
	for _, remedy := range RemedyOf(err) {
		fmt.Fprintf(&text, "  - %s\n", remedy)
	}
	return text.String()
}

// spokeProblem explains an error of the workload cluster's API server.
func spokeProblem(err error, what string) error {
	err = fmt.Errorf("%s: %w", what, err)
	switch {
	case apierrors.IsForbidden(err):
		return problem(err, "Use a kubeconfig whose user may read it: --kubeconfig, --context.")
	case isNoSuchKind(err):
		return problem(err, "Karpenter's CRDs are missing: is this the spoke? See --kubeconfig and --context.")
	case apierrors.IsNotFound(err), apierrors.IsUnauthorized(err):
		return err
	}
	return problem(err, "See whether --kubeconfig and --context name the spoke, and whether its API server can be reached.")
}

// isNoSuchKind reports whether the API server has no objects of the kind at all.
func isNoSuchKind(err error) bool {
	return apierrors.IsNotFound(err) && strings.Contains(err.Error(), "could not find the requested resource")
}

// agentLog shows the agent's log.
const agentLog = "kubectl --context <hub> -n capi-agent-system logs deployment/capi-agent"

// remedies are what to do about the reasons for which an agent that runs does not answer.
var remedies = map[agenterrors.Reason]string{
	agenterrors.ReasonClusterPaused:  "Wait until the Cluster has been moved, or unpause it (spec.paused), and try again.",
	agenterrors.ReasonNotSynced:      "Try again soon. If it stays: " + agentLog,
	agenterrors.ReasonShuttingDown:   "Try again.",
	agenterrors.ReasonHubUnreachable: "See why the agent cannot reach its API server: " + agentLog,
}

// agentProblem explains an error of a call to the agent.
func agentProblem(err error, agent *Agent) error {
	message := status.Convert(err).Message()
	address := agent.Address
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		if remedy, known := remedies[agenterrors.ReasonOf(err)]; known {
			return problem(fmt.Errorf("the agent at %s cannot answer now: %s", address, message), remedy)
		}
		if strings.Contains(message, "handshake failed") || strings.Contains(message, "certificate") {
			return problem(fmt.Errorf("the agent at %s and this client do not accept each other's certificates: %s", address, message),
				"See whether the certificate has expired, and whether the agent's certificate has the name that is expected (--server-name).")
		}
		return problem(fmt.Errorf("the agent at %s does not answer: %s", address, message),
			"If it runs, and this address is not for where you are, forward a port of it: "+
				"kubectl --context <hub> -n capi-agent-system port-forward service/capi-agent 8443, and add --agent-address=localhost:8443.",
			"If it does not: kubectl --context <hub> -n capi-agent-system get pods")
	case codes.Unauthenticated:
		return problem(fmt.Errorf("the agent at %s does not accept the certificate: %s", address, message),
			"Use the certificate that Karpenter has, or one of a reader: --tls-dir (docs/install.md, access for others).")
	case codes.Unimplemented:
		return problem(fmt.Errorf("the agent at %s is of an earlier version: %s", address, message), "Upgrade it (docs/install.md, upgrading).")
	case codes.PermissionDenied:
		if agent.Cluster == nil {
			return problem(fmt.Errorf("the agent at %s refuses: %s", address, message),
				"Use the certificate of a Cluster or of a reader: --tls-dir (docs/install.md, access for others).")
		}
		return problem(fmt.Errorf("the agent at %s refuses the Cluster %s: %s", address, nameOf(agent.Cluster), message),
			"The certificate is for another Cluster, or the Cluster does not exist: see --cluster and --tls-dir.")
	}
	return fmt.Errorf("the agent at %s: %w", address, err)
}
