package kubectl

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	"github.com/spf13/cobra"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

func groupsCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "groups [NAME]",
		Short: "Show the node groups: sizes, prices, room and problems; with a name, where each value comes from",
		Args:  cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if err := access.complete(cmd.Flags()); err != nil || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			groups, _ := access.groups(cmd)
			return lo.Map(groups.GetNodeGroups(), func(g *agentv1alpha1.NodeGroup, _ int) string { return g.GetName() }), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			response, err := access.groups(cmd)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if len(args) == 0 {
				if structured(access.Output) {
					return writeMessage(out, access.Output, response)
				}
				return writeGroups(out, response.GetNodeGroups(), access.Output == formatWide, time.Now())
			}
			group, found := lo.Find(response.GetNodeGroups(), func(g *agentv1alpha1.NodeGroup) bool {
				return g.GetId() == args[0] || g.GetName() == args[0]
			})
			if !found {
				return problem(fmt.Errorf("there is no node group %s", args[0]), "To list them: kubectl capi groups.",
					"A MachineDeployment becomes one by the label node.cluster.x-k8s.io/karpenter-member.")
			}
			if structured(access.Output) {
				return writeMessage(out, access.Output, group)
			}
			return writeGroup(out, group, time.Now())
		},
	}
}

func (a *Access) groups(cmd *cobra.Command) (*agentv1alpha1.ListNodeGroupsResponse, error) {
	agent, err := a.Agent(cmd.Context())
	if err != nil {
		return nil, err
	}
	defer func() { _ = agent.Close() }()
	response, err := agent.NodeGroups.ListNodeGroups(cmd.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: agent.Cluster})
	if err != nil {
		return nil, agentProblem(err, agent)
	}
	return response, nil
}

func writeGroups(to io.Writer, groups []*agentv1alpha1.NodeGroup, wide bool, now time.Time) error {
	header := []string{"GROUP", "TYPE", "ZONE", "CAPACITY TYPE", "MACHINES", "MIN", "MAX", "FLOOR", "PRICE/H", "SOURCE", "AVAILABLE", "PROBLEMS"}
	if wide {
		header = append(header, "CAPACITY", "TAINTS", "VERSION", "ROLLOUT", "WHY NOT")
	}
	rows := [][]string{header}
	for _, g := range groups {
		availability := wire.AvailabilityFor(g, v1alpha1.Holder)
		available := lo.Ternary(availability.GetAvailable(), "yes", explain.Word(availability.GetReason()))
		row := []string{
			g.GetId(), g.GetInstanceType(), g.GetZone(), capacityType(g), strconv.Itoa(int(g.GetReplicas())), strconv.Itoa(int(g.GetMinSize())), most(g),
			strconv.Itoa(int(g.GetFloorReplicas())), price(g), sourceKind(g.GetSources()["price"]), available, count(len(g.GetProblems())),
		}
		if wide {
			row = append(row, capacity(g), taints(g), g.GetKubernetesVersion(), rollout(g), whyNot(g, now))
		}
		rows = append(rows, row)
	}
	return table(to, rows)
}

func capacityType(g *agentv1alpha1.NodeGroup) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(g.GetCapacityType().String(), "CAPACITY_TYPE_"), "_", "-"))
}

func most(g *agentv1alpha1.NodeGroup) string {
	if g.MaxSize == nil {
		return "none"
	}
	return strconv.Itoa(int(g.GetMaxSize()))
}

func price(g *agentv1alpha1.NodeGroup) string {
	if g.GetPrice() == nil {
		return "unknown"
	}
	return strings.TrimSpace(strconv.FormatFloat(g.GetPrice().GetPerHour(), 'g', 6, 64) + " " + g.GetPrice().GetCurrency())
}

func sourceKind(source *agentv1alpha1.ValueSource) string {
	return explain.Camel(strings.TrimPrefix(lo.Ternary(source == nil, "", source.GetKind().String()), "SOURCE_KIND_"))
}

func count(n int) string { return lo.Ternary(n == 0, "", strconv.Itoa(n)) }

func capacity(g *agentv1alpha1.NodeGroup) string {
	return strings.Join(lo.Map(slices.Sorted(maps.Keys(g.GetCapacity())), func(name string, _ int) string {
		return name + "=" + g.GetCapacity()[name]
	}), ",")
}

func taints(g *agentv1alpha1.NodeGroup) string {
	return strings.Join(lo.Map(g.GetTaints(), func(t *agentv1alpha1.Taint, _ int) string {
		return t.GetKey() + lo.Ternary(t.GetValue() == "", "", "="+t.GetValue()) + ":" + t.GetEffect()
	}), ",")
}

func rollout(g *agentv1alpha1.NodeGroup) string {
	strategy := explain.Camel(strings.TrimPrefix(g.GetRolloutStrategy().String(), "ROLLOUT_STRATEGY_"))
	return strategy + lo.Ternary(g.GetRollingOut(), " (running)", "")
}

func whyNot(g *agentv1alpha1.NodeGroup, now time.Time) string {
	availability := wire.AvailabilityFor(g, v1alpha1.Holder)
	if availability.GetAvailable() {
		return ""
	}
	text := oneLine(availability.GetMessage())
	if retry := availability.GetRetryAt(); retry.IsValid() && retry.AsTime().After(now) {
		text += fmt.Sprintf(" (again in %s)", explain.Age(retry.AsTime().Sub(now)))
	}
	return text
}

// values returns the values of a group's description by the names of their sources.
func values(g *agentv1alpha1.NodeGroup) map[string]string {
	v := map[string]string{
		"instance_type": g.GetInstanceType(), "zone": g.GetZone(), "region": g.GetRegion(), "architecture": g.GetArchitecture(),
		"operating_system": g.GetOperatingSystem(), "capacity_type": capacityType(g), "price": price(g), "min_size": strconv.Itoa(int(g.GetMinSize())),
		"max_size": most(g), "kubernetes_version": g.GetKubernetesVersion(), "taints": taints(g),
	}
	for name, quantity := range g.GetCapacity() {
		v["capacity."+name] = quantity
	}
	for name, quantity := range g.GetOverhead() {
		v["overhead."+name] = quantity
	}
	for key, value := range g.GetNodeLabels() {
		v["node_labels."+key] = value
	}
	for driver, n := range g.GetAttachableVolumes() {
		v["attachable_volumes."+driver] = strconv.Itoa(int(n))
	}
	for _, device := range g.GetDevices() {
		v["devices."+device.GetDriver()] = strconv.Itoa(int(device.GetCount()))
	}
	maps.DeleteFunc(v, func(name, value string) bool { return value == "" && g.GetSources()[name] == nil })
	return v
}

// writeGroup writes everything about one node group.
func writeGroup(to io.Writer, g *agentv1alpha1.NodeGroup, now time.Time) error {
	fmt.Fprintf(to, "%s: %s\n", g.GetId(), explain.Size(g))
	if availability := wire.AvailabilityFor(g, v1alpha1.Holder); availability.GetAvailable() {
		fmt.Fprintln(to, "A machine can be claimed now.")
	} else {
		fmt.Fprintf(to, "No machine can be claimed now: %s: %s\n", explain.Word(availability.GetReason()), whyNot(g, now))
	}
	if g.GetRollingOut() {
		fmt.Fprintln(to, "Cluster API is replacing its machines after a template change.")
	}
	fmt.Fprintln(to)
	known := values(g)
	for name := range g.GetSources() {
		if _, has := known[name]; !has {
			known[name] = ""
		}
	}
	rows := [][]string{{"VALUE", "IS", "SOURCE", "FROM"}}
	for _, name := range slices.Sorted(maps.Keys(known)) {
		source := g.GetSources()[name]
		rows = append(rows, []string{name, oneLine(known[name]), sourceKind(source), oneLine(source.GetDetail())})
	}
	if err := table(to, rows); err != nil {
		return err
	}
	if len(g.GetProblems()) == 0 {
		return nil
	}
	fmt.Fprintln(to, "\nProblems, on the MachineDeployment in the hub:")
	for _, p := range g.GetProblems() {
		fmt.Fprintf(to, "  - %s = %q: %s\n", oneLine(p.GetField()), p.GetValue(), oneLine(p.GetMessage()))
	}
	return nil
}
