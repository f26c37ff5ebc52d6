// Command claimer claims a machine of a Cluster, waits until it is a Node, and releases it. It is an example of a tool that calls
// an agent; docs/clients.md explains it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := start(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "claimer:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("claimer", flag.ContinueOnError)
	address := flags.String("address", "127.0.0.1:8443", "the agent's `host:port`")
	certificates := flags.String("certificates", "", "the `folder` with tls.crt, tls.key and ca.crt; empty for an agent on loopback without TLS")
	cluster := flags.String("cluster", "fleet/spoke", "the `namespace/name` of the Cluster")
	nodeGroup := flags.String("node-group", "", "the `namespace/name` of the only node group to claim from; empty for all that are available")
	claimID := flags.String("claim-id", "", "a DNS label that no claim of the Cluster has ever used")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *claimID == "" {
		return errors.New("-claim-id is required")
	}
	namespace, name, _ := strings.Cut(*cluster, "/")

	agent, err := connect(*address, *certificates)
	if err != nil {
		return err
	}
	defer agent.Close() //nolint:errcheck // Nothing is left to lose.

	return run(ctx, agent, &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}, *claimID, *nodeGroup, out)
}

func connect(address, certificates string) (*client.Client, error) {
	options := client.Options{Address: address, UserAgent: "claimer/v1"}
	if certificates == "" {
		options.PlaintextLoopback = true
	} else {
		options.TLS = &client.TLS{
			CertFile: certificates + "/tls.crt",
			KeyFile:  certificates + "/tls.key",
			CAFile:   certificates + "/ca.crt",
		}
	}
	return client.New(options)
}

// run lives through the whole of a claim.
func run(ctx context.Context, agent *client.Client, cluster *agentv1alpha1.ClusterRef, claimID, nodeGroup string, out io.Writer) error {
	candidates := []string{nodeGroup}
	if nodeGroup == "" {
		listed, err := agent.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: cluster})
		if err != nil {
			return err
		}
		candidates = cheapestFirst(listed.GetNodeGroups())
		fmt.Fprintln(out, "candidates:", strings.Join(candidates, ", "))
	}

	// Watch before the first call, so that nothing is missed. Canceling watching ends the mirror.
	watching, stop := context.WithCancel(ctx)
	defer stop()
	claims := agent.MirrorClaims(cluster, holder)
	changes := claims.Subscribe()
	defer changes.Close()
	go claims.Run(watching) //nolint:errcheck // It only returns the end of watching.

	// Whatever happens from here on, the machine must not be left behind. A claim whose answer was lost exists, too.
	var current *agentv1alpha1.Claim
	err := claim(ctx, agent, cluster, claimID, candidates, out)
	if err == nil {
		current, err = waitFor(ctx, claims, changes, claimID, func(c *agentv1alpha1.Claim) bool {
			return c.GetMachine().GetNodeName() != "" || c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
		}, out)
	}
	switch {
	case err != nil:
	case current.GetMachine().GetNodeName() == "":
		err = fmt.Errorf("claim %s has ended as %s: %s", claimID, current.GetReason(), current.GetMessage())
	default:
		fmt.Fprintf(out, "node: %s, instance: %s\n", current.GetMachine().GetNodeName(), current.GetMachine().GetProviderId())
	}
	if releaseErr := release(context.WithoutCancel(ctx), agent, cluster, claimID); releaseErr != nil {
		return errors.Join(err, releaseErr)
	}
	if err != nil {
		return err
	}
	_, err = waitFor(ctx, claims, changes, claimID, func(c *agentv1alpha1.Claim) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, out)
	return err
}

// holder owns the claims. The identity of the certificate determines which holders it may act as.
const holder = "claimer"

// cheapestFirst returns the node groups that take claims now. Those without a price come last.
func cheapestFirst(groups []*agentv1alpha1.NodeGroup) []string {
	groups = slices.DeleteFunc(slices.Clone(groups), func(g *agentv1alpha1.NodeGroup) bool {
		return !g.GetAvailability().GetAvailable()
	})
	slices.SortStableFunc(groups, func(a, b *agentv1alpha1.NodeGroup) int { return cmp.Compare(price(a), price(b)) })
	ids := make([]string, 0, len(groups))
	for _, group := range groups {
		ids = append(ids, group.GetId())
	}
	return ids
}

func price(group *agentv1alpha1.NodeGroup) float64 {
	if group.GetPrice() == nil {
		return math.Inf(1)
	}
	return group.GetPrice().GetPerHour()
}

// claim makes the claim durable. Its machine comes later.
func claim(
	ctx context.Context, agent *client.Client, cluster *agentv1alpha1.ClusterRef, claimID string, candidates []string, out io.Writer,
) error {
	for {
		created, err := agent.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: cluster, ClaimId: claimID, Holder: holder, Candidates: candidates,
		})
		switch {
		case err == nil:
			fmt.Fprintln(out, "claimed from:", created.GetClaim().GetNodeGroupId())
			return nil
		case agenterrors.IsConflict(err):
			continue // Another writer was faster. The same id makes it safe to repeat the call.
		case agenterrors.IsUnavailable(err):
			// The claim may exist. The same id finds it, or makes it.
			if err := wait(ctx, err); err != nil {
				return err
			}
		case len(agenterrors.Rejections(err)) > 0:
			for _, rejection := range agenterrors.Rejections(err) {
				fmt.Fprintf(out, "rejected: %s: %s: %s\n", rejection.NodeGroup, rejection.Unavailable, rejection.Message)
			}
			return fmt.Errorf("no machine can be claimed: %w", err)
		case agenterrors.IsEnded(err):
			end, _ := agenterrors.EndedAs(err)
			return fmt.Errorf("claim %s has ended as %s; choose another id: %w", claimID, end.Reason, err)
		default:
			return err
		}
	}
}

// wait waits as long as the error asks, or a second.
func wait(ctx context.Context, err error) error {
	delay, ok := agenterrors.RetryDelay(err)
	if !ok {
		delay = time.Second
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(delay):
		return nil
	}
}

// waitFor follows the claim until done returns true. The mirror reconnects by itself.
func waitFor(
	ctx context.Context, claims *client.Mirror[*agentv1alpha1.Claim], changes *client.Subscription, claimID string,
	done func(*agentv1alpha1.Claim) bool, out io.Writer,
) (*agentv1alpha1.Claim, error) {
	shown := ""
	for {
		if current, ok := claims.Get(claimID); ok {
			if line := fmt.Sprintf("%s %s", current.GetPhase(), current.GetReason()); line != shown {
				fmt.Fprintln(out, line)
				shown = line
			}
			if done(current) {
				return current, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changes.Changed():
			changes.Take()
		}
	}
}

// release returns the claim's machine. It is safe to repeat, and succeeds for a claim that was never made.
func release(ctx context.Context, agent *client.Client, cluster *agentv1alpha1.ClusterRef, claimID string) error {
	for {
		_, err := agent.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
			Cluster: cluster, ClaimId: claimID, Reason: "the example is over",
		})
		switch {
		case agenterrors.IsConflict(err):
		case agenterrors.IsUnavailable(err):
			if err := wait(ctx, err); err != nil {
				return err
			}
		default:
			return err
		}
	}
}
