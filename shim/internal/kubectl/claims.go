package kubectl

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/samber/lo"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

func claimsCommand(access *Access) *cobra.Command {
	var all bool
	command := &cobra.Command{
		Use:   "claims [NODECLAIM|CLAIM ID]",
		Short: "Show the claims on machines; with a name, one of them with its history",
		Args:  cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if err := access.complete(cmd.Flags()); err != nil || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			claims, _ := access.claims(cmd, all)
			return lo.Uniq(lo.Map(claims.GetClaims(), func(c *agentv1alpha1.Claim, _ int) string {
				return cmp.Or(oneLine(c.GetDisplayName()), c.GetClaimId())
			})), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			response, err := access.claims(cmd, all || len(args) > 0)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if len(args) > 0 {
				of := lo.Filter(response.GetClaims(), func(c *agentv1alpha1.Claim, _ int) bool {
					return c.GetClaimId() == args[0] || c.GetDisplayName() == args[0]
				})
				if len(of) == 0 {
					return fmt.Errorf("there is no claim %s, and no tombstone of one", args[0])
				}
				claim := lo.LastOrEmpty(of)
				if structured(access.Output) {
					return writeMessage(out, access.Output, claim)
				}
				return writeClaim(out, claim, time.Now())
			}
			if structured(access.Output) {
				response.Token = ""
				return writeMessage(out, access.Output, response)
			}
			return writeClaims(out, response.GetClaims(), access.Output == formatWide, time.Now())
		},
	}
	command.Flags().BoolVar(&all, "all", false, "Also show ended claims whose tombstones are kept.")
	return command
}

func (a *Access) claims(cmd *cobra.Command, ended bool) (*agentv1alpha1.ListClaimsResponse, error) {
	agent, err := a.Agent(cmd.Context())
	if err != nil {
		return nil, err
	}
	defer func() { _ = agent.Close() }()
	response, err := agent.Claims.ListClaims(cmd.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: agent.Cluster, IncludeEnded: ended})
	if err != nil {
		return nil, agentProblem(err, agent)
	}
	return response, nil
}

func writeClaims(to io.Writer, claims []*agentv1alpha1.Claim, wide bool, now time.Time) error {
	header := []string{"CLAIMED BY", "GROUP", "PHASE", "REASON", "MACHINE", "MACHINE PHASE", "NODE", "AGE"}
	if wide {
		header = append(header, "CLAIM ID", "HOLDER", "PROVIDER ID", "MESSAGE")
	}
	rows := [][]string{header}
	for _, c := range claims {
		m := c.GetMachine()
		row := []string{
			cmp.Or(oneLine(c.GetDisplayName()), c.GetClaimId()), c.GetNodeGroupId(), explain.ClaimPhase(c.GetPhase()), c.GetReason(),
			m.GetName(), m.GetPhase(), m.GetNodeName(), age(c.GetCreatedAt(), now),
		}
		if wide {
			row = append(row, c.GetClaimId(), c.GetHolder(), m.GetProviderId(), oneLine(cmp.Or(c.GetMessage(), m.GetInfrastructureMessage())))
		}
		rows = append(rows, row)
	}
	return table(to, rows)
}

func age(at *timestamppb.Timestamp, now time.Time) string {
	if !at.IsValid() {
		return ""
	}
	return explain.Age(now.Sub(at.AsTime()))
}

func writeClaim(to io.Writer, c *agentv1alpha1.Claim, now time.Time) error {
	fmt.Fprintf(to, "Claim %s of %s, held by %s: %s", c.GetClaimId(), cmp.Or(oneLine(c.GetDisplayName()), "an unnamed owner"), c.GetHolder(),
		explain.ClaimPhase(c.GetPhase()))
	if c.GetReason() != "" && c.GetReason() != explain.ClaimPhase(c.GetPhase()) {
		fmt.Fprintf(to, " (%s)", c.GetReason())
	}
	fmt.Fprintln(to)
	for _, line := range []struct{ what, is string }{
		{"Node group", c.GetNodeGroupId()},
		{kindMachine, c.GetMachine().GetName()},
		{"Provider ID", c.GetMachine().GetProviderId()},
		{"Node", c.GetMachine().GetNodeName()},
		{"Message", c.GetMessage()},
		{"Infrastructure", joined(c.GetMachine().GetInfrastructureReason(), c.GetMachine().GetInfrastructureMessage())},
	} {
		if line.is != "" {
			fmt.Fprintf(to, "  %-14s  %s\n", line.what, oneLine(line.is))
		}
	}
	fmt.Fprintln(to)
	rows := [][]string{{"AGE", "WHAT", "MESSAGE"}}
	for _, event := range c.GetHistory() {
		rows = append(rows, []string{age(event.GetTime(), now), event.GetReason(), oneLine(event.GetMessage())})
	}
	return table(to, rows)
}

// joined joins a reason and a message.
func joined(reason, message string) string {
	if reason == "" || message == "" {
		return reason + message
	}
	return reason + ": " + message
}
