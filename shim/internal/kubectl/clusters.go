package kubectl

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// showClusters is `spokes` without the management cluster's kubeconfig: it shows the Clusters that
// the agent reports.
func (a *Access) showClusters(cmd *cobra.Command, args []string) error {
	response, err := a.clusters(cmd.Context())
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if len(args) == 0 {
		if structured(a.Output) {
			return writeMessage(out, a.Output, response)
		}
		return writeClusters(out, response.GetClusters(), a.Output == formatWide, time.Now())
	}
	one, err := clusterNamed(response.GetClusters(), args[0])
	if err != nil {
		return err
	}
	if structured(a.Output) {
		return writeMessage(out, a.Output, one)
	}
	return writeCluster(out, one, time.Now())
}

// clusters returns the Clusters that the agent reports to this identity, or those of one namespace.
func (a *Access) clusters(ctx context.Context) (*agentv1alpha1.ListClustersResponse, error) {
	agent, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = agent.Close() }()
	agent.Cluster = nil // the call names none
	response, err := agent.Clusters.ListClusters(ctx, &agentv1alpha1.ListClustersRequest{})
	if err != nil {
		return nil, agentProblem(err, agent)
	}
	response.Clusters = lo.Filter(response.GetClusters(), func(c *agentv1alpha1.Cluster, _ int) bool {
		return a.Namespace == "" || a.Namespace == c.GetRef().GetNamespace()
	})
	return response, nil
}

// clusterNamed returns the Cluster with a name, which may be given as <namespace>/<name>.
func clusterNamed(clusters []*agentv1alpha1.Cluster, name string) (*agentv1alpha1.Cluster, error) {
	found := lo.Filter(clusters, func(c *agentv1alpha1.Cluster, _ int) bool {
		return c.GetRef().GetName() == name || nameOf(c.GetRef()) == name
	})
	if len(found) == 0 {
		return nil, problem(fmt.Errorf("the agent reports no Cluster %s", name), "To list them: kubectl capi spokes.",
			"The certificate may be for other Clusters: see --tls-dir. The hub has all of them: see --hub-kubeconfig.")
	}
	if len(found) > 1 {
		return nil, ambiguous(len(found), "a Cluster "+name)
	}
	return found[0], nil
}

func writeClusters(to io.Writer, clusters []*agentv1alpha1.Cluster, wide bool, now time.Time) error {
	header := []string{"CLUSTER", "CONNECTED", "LAST SYNC", "SHIM", "CERTIFICATE ENDS IN", "GROUPS", "MACHINES", "CLAIMS"}
	if wide {
		header = append(header, "PENDING", "STATE", "SPOKE ID")
	}
	rows := [][]string{header}
	for _, c := range clusters {
		shim := c.GetShim()
		row := []string{
			nameOf(c.GetRef()), shimConnected(c), ago(shim.GetLastSync(), now), oneLine(shim.GetVersion()), shimCertificate(c, now),
			strconv.Itoa(int(c.GetNodeGroups())), strconv.Itoa(int(c.GetMachines())), strconv.Itoa(int(c.GetClaims())),
		}
		if wide {
			row = append(row, strconv.Itoa(int(c.GetPendingClaims())), clusterState(c), oneLine(shim.GetSpokeId()))
		}
		rows = append(rows, row)
	}
	return table(to, rows)
}

// writeCluster writes everything that the agent reports about one Cluster.
func writeCluster(to io.Writer, c *agentv1alpha1.Cluster, now time.Time) error {
	shim := c.GetShim()
	fmt.Fprintf(to, "%s\n\n", nameOf(c.GetRef()))
	err := table(to, [][]string{
		{"connected", shimConnected(c)},
		{"last sync", ago(shim.GetLastSync(), now)},
		{"shim", oneLine(shim.GetVersion())},
		{"certificate ends in", shimCertificate(c, now)},
		{"spoke ID", oneLine(shim.GetSpokeId())},
		{"created", ago(c.GetCreatedAt(), now)},
		{"state", clusterState(c)},
		{"node groups", strconv.Itoa(int(c.GetNodeGroups()))},
		{"machines", strconv.Itoa(int(c.GetMachines()))},
		{"claims", fmt.Sprintf("%d, %d of them pending", c.GetClaims(), c.GetPendingClaims())},
	})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(to, "\nIts NodePools, and what the hub publishes to it, are in the hub: see --hub-kubeconfig.")
	return err
}

// shimConnected returns whether the Cluster's shim is connected, or "never" if it never was.
func shimConnected(c *agentv1alpha1.Cluster) string {
	if c.GetShim() == nil {
		return "never"
	}
	return yesOrNo(c.GetShim().GetConnected())
}

// clusterState returns what prevents scaling, or an empty text.
func clusterState(c *agentv1alpha1.Cluster) string {
	var state []string
	if c.GetPaused() {
		state = append(state, "paused")
	}
	if c.GetDeleting() {
		state = append(state, "deleting")
	}
	return strings.Join(state, ", ")
}

func ago(at *timestamppb.Timestamp, now time.Time) string {
	if text := age(at, now); text != "" {
		return text + " ago"
	}
	return ""
}

// shimCertificate returns the time until the shim's certificate expires, or an empty text if the
// shim has none.
func shimCertificate(c *agentv1alpha1.Cluster, now time.Time) string {
	if at := c.GetShim().GetCertificateNotAfter(); at.IsValid() {
		return endsIn(at.AsTime(), now)
	}
	return ""
}
