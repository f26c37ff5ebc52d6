package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Options are the addresses of an agent and its control.
type Options struct {
	// Control is the URL of the control, for example http://127.0.0.1:8444. REQUIRED.
	Control string
	// Address is the address of the agent, as in [client.Options]. ServerName is the name in its
	// certificate, or empty for the host of the address. REQUIRED.
	Address, ServerName string
	// Within is how long to wait for conditions that the agent must reach eventually. REQUIRED.
	Within time.Duration
}

// Dial returns a function that creates an Env from a new environment. It first requests an
// environment from the control, so that errors are reported before any check.
func Dial(ctx context.Context, o Options) (func(testing.TB) conformance.Env, error) {
	if parsed, err := url.Parse(o.Control); err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" {
		return nil, fmt.Errorf("%q is not the URL of a control; write for example http://127.0.0.1:8444", o.Control)
	}
	first, err := o.open(ctx)
	if err != nil {
		return nil, err
	}
	_, err = first.callers[conformance.CallerCluster].Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	if err = errors.Join(err, first.close(ctx)); err != nil {
		return nil, fmt.Errorf("calling the agent with a certificate of the control: %w", err)
	}
	return func(tb testing.TB) conformance.Env {
		tb.Helper()
		e, err := o.open(tb.Context())
		require.NoError(tb, err)
		tb.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), o.Within)
			defer cancel()
			require.NoError(tb, e.close(ctx))
		})
		if e.has(ApplyNodePoolSet) && e.has(DeleteNodePoolSet) {
			return publishing{e}
		}
		return e
	}, nil
}

// open creates an environment, and clients for its callers.
func (o Options) open(ctx context.Context) (*env, error) {
	response, err := o.post(ctx, NewEnvironment, Request{})
	if err != nil {
		return nil, err
	}
	made := response.Environment
	if made == nil {
		return nil, fmt.Errorf("control: %s: the answer has no environment", NewEnvironment)
	}
	e := &env{Options: o, cluster: made.Cluster, operations: made.Operations, callers: map[conformance.Caller]*client.Client{}}
	for _, caller := range []conformance.Caller{
		conformance.CallerCluster, conformance.CallerAutoscaler, conformance.CallerAdmin, conformance.CallerStranger,
	} {
		if e.callers[caller], err = o.connect(made.Callers[caller], made.Authorities); err != nil {
			return nil, errors.Join(fmt.Errorf("control: %s: the caller %s: %w", NewEnvironment, caller, err), e.close(ctx))
		}
	}
	return e, nil
}

func (o Options) connect(pair KeyPair, authorities string) (*client.Client, error) {
	held := certificates.NewHeld(nil)
	if err := held.Hold(certificates.PEM{
		Certificate: []byte(pair.Certificate), Key: []byte(pair.Key), Authorities: []byte(authorities),
	}); err != nil {
		return nil, err
	}
	return client.New(client.Options{
		Address: o.Address, TLS: &client.TLS{Source: held, ServerName: o.ServerName}, UserAgent: "capi-agent-conformance",
	})
}

// maxResponse limits the size of a response, in bytes.
const maxResponse = 4 << 20

func (o Options) post(ctx context.Context, operation string, request Request) (Response, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Within)
	defer cancel()
	body, err := json.Marshal(request)
	if err != nil {
		return Response{}, err
	}
	to := strings.TrimSuffix(o.Control, "/") + "/v1/" + operation
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return Response{}, err
	}
	post.Header.Set("Content-Type", "application/json")
	answered, err := http.DefaultClient.Do(post)
	if err != nil {
		return Response{}, fmt.Errorf("control: %w", err)
	}
	defer func() { _ = answered.Body.Close() }() // The body has been read.
	var response Response
	if err := json.NewDecoder(io.LimitReader(answered.Body, maxResponse)).Decode(&response); err != nil {
		return Response{}, fmt.Errorf("control: %s: status %s, and no JSON: %w", operation, answered.Status, err)
	}
	if answered.StatusCode != http.StatusOK || response.Error != "" {
		return Response{}, fmt.Errorf("control: %s: status %s: %s", operation, answered.Status, response.Error)
	}
	return response, nil
}

// env is the [conformance.Env] of one case.
type env struct {
	Options

	cluster Cluster
	callers map[conformance.Caller]*client.Client
	// operations are the optional operations of the control.
	operations []string
}

// publishing is an env whose control can publish NodePools.
type publishing struct{ *env }

var (
	_ conformance.Env        = &env{}
	_ conformance.Ageing     = &env{}
	_ conformance.Env        = publishing{}
	_ conformance.Ageing     = publishing{}
	_ conformance.Publishing = publishing{}
)

func (e *env) has(operation string) bool { return slices.Contains(e.operations, operation) }

func (e *env) close(ctx context.Context) error {
	var errs []error
	for _, c := range e.callers {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	_, err := e.post(ctx, EndEnvironment, Request{Cluster: e.cluster})
	return errors.Join(append(errs, err)...)
}

// do calls an operation of the control on the environment.
func (e *env) do(tb testing.TB, operation string, request Request) Response {
	tb.Helper()
	request.Cluster = e.cluster
	response, err := e.post(tb.Context(), operation, request)
	require.NoError(tb, err)
	return response
}

func (e *env) Cluster() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: e.cluster.Namespace, Name: e.cluster.Name}
}

func (e *env) Client() *client.Client { return e.callers[conformance.CallerCluster] }

func (e *env) Autoscaler() *client.Client { return e.callers[conformance.CallerAutoscaler] }

func (e *env) Admin() *client.Client { return e.callers[conformance.CallerAdmin] }

func (e *env) Stranger() *client.Client { return e.callers[conformance.CallerStranger] }

func (e *env) Patience() time.Duration { return e.Within }

func (e *env) CreateNodeGroup(tb testing.TB, deployment conformance.MachineDeployment) string {
	tb.Helper()
	return e.do(tb, CreateNodeGroup, Request{Deployment: &deployment}).NodeGroupID
}

func (e *env) UpdateNodeGroup(tb testing.TB, deployment conformance.MachineDeployment) {
	tb.Helper()
	e.do(tb, UpdateNodeGroup, Request{Deployment: &deployment})
}

func (e *env) DeleteNodeGroup(tb testing.TB, name string) {
	tb.Helper()
	e.do(tb, DeleteNodeGroup, Request{Name: name})
}

func (e *env) HoldMachines(tb testing.TB, name string, hold bool) {
	tb.Helper()
	e.do(tb, HoldMachines, Request{Name: name, Hold: hold})
}

func (e *env) ProvisionMachine(tb testing.TB, claimID string) {
	tb.Helper()
	e.do(tb, ProvisionMachine, Request{ClaimID: claimID})
}

func (e *env) JoinNode(tb testing.TB, machineName string) {
	tb.Helper()
	e.do(tb, JoinNode, Request{Machine: machineName})
}

func (e *env) LoseMachine(tb testing.TB, machineName string) {
	tb.Helper()
	e.do(tb, LoseMachine, Request{Machine: machineName})
}

func (e *env) StaleToken(tb testing.TB, holder string) string {
	tb.Helper()
	response, err := e.Client().Claims.ListClaims(tb.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: e.Cluster(), Holder: holder})
	require.NoError(tb, err)
	e.do(tb, ExpireTokens, Request{})
	return response.GetToken()
}

func (p publishing) ApplyNodePoolSet(tb testing.TB, set conformance.NodePoolSet) {
	tb.Helper()
	p.do(tb, ApplyNodePoolSet, Request{NodePoolSet: &set})
}

func (p publishing) DeleteNodePoolSet(tb testing.TB, name string) {
	tb.Helper()
	p.do(tb, DeleteNodePoolSet, Request{Name: name})
}
