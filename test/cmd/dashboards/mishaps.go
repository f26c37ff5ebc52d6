package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/samber/lo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/dashboards"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// mishapsWithin bounds all mishaps together.
const mishapsWithin = 9 * time.Minute

// mishaps causes, one after the other, what the dashboards show of failures: a value of a node
// group that cannot be used, an infrastructure without capacity, a caller without a certificate,
// and a hub whose API server hangs while pods need a node.
func mishaps(ctx context.Context, w *testenv.Env) error {
	ctx, cancel := context.WithTimeout(ctx, mishapsWithin)
	defer cancel()
	for _, mishap := range []func(context.Context, *testenv.Env) error{mistypedPrice, noCapacity, noCertificate, hubHangs} {
		if err := mishap(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

func mistypedPrice(ctx context.Context, w *testenv.Env) error {
	return patch(ctx, w.Hub, &clusterv1.MachineDeployment{ObjectMeta: inFleet("small-b-spot")},
		`{"metadata":{"annotations":{"cluster.x-k8s.io/machine-current-price":"cheap"}}}`)
}

// noCapacity asks for machines that the infrastructure does not have, until the claim has failed.
func noCapacity(ctx context.Context, w *testenv.Env) error {
	template := &simv1.SimMachineTemplate{ObjectMeta: inFleet("large-b")}
	if err := patch(ctx, w.Hub, template,
		`{"spec":{"template":{"spec":{"failure":{"reason":"InsufficientCapacity","message":"no host has room"}}}}}`); err != nil {
		return err
	}
	data := types.NamespacedName{Namespace: "default", Name: "data"}
	if err := w.Scale(ctx, data, 1); err != nil {
		return err
	}
	err := testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := w.Hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: "large-b"})
		failed := lo.SomeBy(claims.Items, func(c agentv1.MachineClaim) bool { return c.Status.FailedAt != nil })
		return lo.Ternary(failed, "", "a claim to fail"), err
	})
	return errors.Join(err, w.Scale(ctx, data, 0), patch(ctx, w.Hub, template, `{"spec":{"template":{"spec":{"failure":null}}}}`))
}

// noCertificate connects to the agent like a client that has no certificate yet.
func noCertificate(ctx context.Context, w *testenv.Env) error {
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
	conn, err := dialer.DialContext(ctx, "tcp", w.Sandbox.State().AgentAddress)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.ReadAll(conn); err == nil || !strings.Contains(err.Error(), "certificate") { // TLS 1.3 refuses it with the first read
		return fmt.Errorf("the agent did not refuse a client without a certificate: %w", err)
	}
	return nil
}

// hubHangs suspends the hub's API server while pods need a node, until a call of the shim has
// failed.
func hubHangs(ctx context.Context, w *testenv.Env) error {
	web := types.NamespacedName{Namespace: "default", Name: "web"}
	if err := w.Sandbox.Suspend(sandbox.HubAPIServer); err != nil {
		return err
	}
	err := w.Scale(ctx, web, 6)
	if err == nil {
		err = testenv.Poll(ctx, func(ctx context.Context) (string, error) { return failedCall(ctx, w.Sandbox.State().ShimMetrics) })
	}
	err = errors.Join(err, w.Sandbox.Resume(sandbox.HubAPIServer))
	if err == nil {
		err = testenv.Poll(ctx, func(ctx context.Context) (string, error) {
			pending, err := w.Pending(ctx)
			return lo.Ternary(len(pending) == 0, "", fmt.Sprintf("%d pods to run", len(pending))), err
		})
	}
	return errors.Join(err, w.Scale(ctx, web, 0))
}

// failedCall reports whether a call of Karpenter to its provider has failed, according to the
// shim's metrics.
func failedCall(ctx context.Context, url string) (missing string, err error) {
	text, err := dashboards.Metrics(ctx, url)
	counted := lo.SomeBy(strings.Split(string(text), "\n"), func(line string) bool {
		return strings.HasPrefix(line, "karpenter_cloudprovider_errors_total{") && strings.Contains(line, `method="Create"`)
	})
	return lo.Ternary(counted, "", "a call to the agent to fail"), err
}

func inFleet(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}
}

func patch(ctx context.Context, hub client.Client, object client.Object, text string) error {
	if err := hub.Patch(ctx, object, client.RawPatch(types.MergePatchType, []byte(text))); err != nil {
		return fmt.Errorf("patching %s: %w", object.GetName(), err)
	}
	return nil
}
