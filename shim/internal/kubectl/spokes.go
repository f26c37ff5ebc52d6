package kubectl

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	"github.com/spf13/cobra"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// spoke is what is shown of a Spoke of the management cluster.
type spoke struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Enrollment *struct {
			Time metav1.Time `json:"time"`
		} `json:"enrollment"`
	} `json:"spec"`
	Status struct {
		Conditions   []metav1.Condition `json:"conditions"`
		LastSyncTime *metav1.Time       `json:"lastSyncTime"`
		ShimVersion  string             `json:"shimVersion"`
		SpokeID      string             `json:"spokeID"`
		Certificate  *struct {
			Serial   string       `json:"serial"`
			NotAfter *metav1.Time `json:"notAfter"`
		} `json:"certificate"`
		NodePools []struct {
			Name              string `json:"name"`
			Set               string `json:"set"`
			Ready             bool   `json:"ready"`
			Nodes             int32  `json:"nodes"`
			PendingNodeClaims int32  `json:"pendingNodeClaims"`
			PricePerHour      string `json:"pricePerHour"`
			Message           string `json:"message"`
		} `json:"nodePools"`
		MoreNodePools int32 `json:"moreNodePools"`
		Published     []struct {
			Kind    string `json:"kind"`
			Name    string `json:"name"`
			Set     string `json:"set"`
			Applied bool   `json:"applied"`
			Message string `json:"message"`
		} `json:"published"`
	} `json:"status"`
}

// connected returns whether the spoke's shim is connected, with the reason, and what to know about
// it.
func (s *spoke) connected() (state, message string) {
	condition := apimeta.FindStatusCondition(s.Status.Conditions, "Connected")
	if condition == nil {
		return "unknown", ""
	}
	return string(condition.Status) + " (" + condition.Reason + ")", oneLine(condition.Message)
}

// onboarded returns how long ago the spoke was onboarded, or an empty text if it was not.
func (s *spoke) onboarded(now time.Time) string {
	if s.Spec.Enrollment == nil {
		return ""
	}
	return since(&s.Spec.Enrollment.Time, now)
}

// nodePools returns how many NodePools the spoke has, and how many Nodes they have in all. Both are
// empty if the shim reports none, and the Nodes also if it does not report every NodePool.
func (s *spoke) nodePools() (pools, nodes string) {
	if len(s.Status.NodePools) == 0 {
		return "", ""
	}
	if s.Status.MoreNodePools > 0 {
		return strconv.Itoa(len(s.Status.NodePools) + int(s.Status.MoreNodePools)), ""
	}
	sum := int32(0)
	for _, pool := range s.Status.NodePools {
		sum += pool.Nodes
	}
	return strconv.Itoa(len(s.Status.NodePools)), strconv.Itoa(int(sum))
}

// certificateEndsIn returns the time until the shim's certificate expires, "ended" if it has, or an
// empty text if the shim has none.
func (s *spoke) certificateEndsIn(now time.Time) string {
	if certificate := s.Status.Certificate; certificate != nil && certificate.NotAfter != nil {
		return endsIn(certificate.NotAfter.Time, now)
	}
	return ""
}

// endsIn returns the time until a certificate expires, or "ended" if it has.
func endsIn(at, now time.Time) string {
	if at.After(now) {
		return explain.Age(at.Sub(now))
	}
	return "ended"
}

func spokesCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "spokes [CLUSTER]",
		Short: "Show the spokes whose Karpenter calls the agent; with a name, one of them",
		Long: "Show the spokes whose Karpenter calls the agent. With the hub's kubeconfig it reads the Spokes there, " +
			"and with a name it shows the NodePools of one, and what the hub publishes to it. Without it, the agent reports the Clusters that the " +
			"certificate may read, with counts instead of NodePools.",
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if err := access.complete(cmd.Flags()); err != nil || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			if !access.hasHub() {
				clusters, _ := access.clusters(cmd.Context())
				return lo.Map(clusters.GetClusters(), func(c *agentv1alpha1.Cluster, _ int) string { return nameOf(c.GetRef()) }),
					cobra.ShellCompDirectiveNoFileComp
			}
			list, err := access.spokes(cmd.Context())
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return lo.Map(list.Items, func(s unstructured.Unstructured, _ int) string { return s.GetNamespace() + "/" + s.GetName() }),
				cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if !access.hasHub() {
				return access.showClusters(cmd, args)
			}
			list, err := access.spokes(cmd.Context())
			if err != nil {
				return err
			}
			if len(args) > 0 {
				one, err := spokeNamed(list.Items, args[0])
				if err != nil {
					return err
				}
				if structured(access.Output) {
					return writeValue(cmd.OutOrStdout(), access.Output, one)
				}
				var s spoke
				if err := decode(one.Object, &s); err != nil {
					return err
				}
				return writeSpoke(cmd.OutOrStdout(), &s, time.Now())
			}
			if structured(access.Output) {
				return writeValue(cmd.OutOrStdout(), access.Output, list)
			}
			spokes := make([]spoke, len(list.Items))
			for i := range list.Items {
				if err := decode(list.Items[i].Object, &spokes[i]); err != nil {
					return err
				}
			}
			return writeSpokes(cmd.OutOrStdout(), spokes, access.Output == formatWide, time.Now())
		},
	}
}

// spokes reads the Spokes of the hub, or of one of its namespaces.
func (a *Access) spokes(ctx context.Context) (*unstructured.UnstructuredList, error) {
	kube, err := a.Hub()
	if err != nil {
		return nil, err
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(spokeKind.GroupVersion().WithKind("SpokeList"))
	var options []client.ListOption
	if a.Namespace != "" {
		options = append(options, client.InNamespace(a.Namespace))
	}
	if err := kube.List(ctx, list, options...); err != nil {
		return nil, problem(fmt.Errorf("reading the Spokes: %w", err),
			"See whether --hub-kubeconfig and --hub-context name the hub, and whether the agent's CRDs are there.")
	}
	return list, nil
}

// spokeNamed returns the Spoke of a Cluster, which is given as its name or as <namespace>/<name>.
func spokeNamed(spokes []unstructured.Unstructured, name string) (*unstructured.Unstructured, error) {
	found := lo.Filter(spokes, func(s unstructured.Unstructured, _ int) bool {
		return s.GetName() == name || s.GetNamespace()+"/"+s.GetName() == name
	})
	if len(found) == 0 {
		return nil, problem(fmt.Errorf("there is no Spoke %s", name), "To list them: kubectl capi spokes.",
			"A Cluster has one once it was onboarded, or once its Karpenter has called the agent.")
	}
	if len(found) > 1 {
		return nil, ambiguous(len(found), "a Spoke "+name)
	}
	return &found[0], nil
}

func ambiguous(namespaces int, what string) error {
	return problem(fmt.Errorf("%d namespaces have %s", namespaces, what), "Name one as <namespace>/<name>, or give --namespace.")
}

func writeSpokes(to io.Writer, spokes []spoke, wide bool, now time.Time) error {
	slices.SortFunc(spokes, func(x, y spoke) int {
		return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
	header := []string{"CLUSTER", "CONNECTED", "LAST SYNC", "SHIM", "CERTIFICATE ENDS IN", "ONBOARDED"}
	if wide {
		header = append(header, "NODEPOOLS", "NODES", "SPOKE ID", "SERIAL", "MESSAGE")
	}
	rows := [][]string{header}
	for i := range spokes {
		s := &spokes[i]
		connected, message := s.connected()
		row := []string{
			s.Namespace + "/" + s.Name, connected, since(s.Status.LastSyncTime, now), s.Status.ShimVersion, s.certificateEndsIn(now), s.onboarded(now),
		}
		if wide {
			pools, nodes := s.nodePools()
			serial := ""
			if s.Status.Certificate != nil {
				serial = s.Status.Certificate.Serial
			}
			row = append(row, pools, nodes, s.Status.SpokeID, serial, message)
		}
		rows = append(rows, row)
	}
	return table(to, rows)
}

// writeSpoke writes everything about one spoke.
func writeSpoke(to io.Writer, s *spoke, now time.Time) error {
	connected, message := s.connected()
	rows := [][]string{
		{"connected", strings.TrimSpace(connected + " " + message)},
		{"last sync", since(s.Status.LastSyncTime, now)},
		{"shim", s.Status.ShimVersion},
		{"certificate ends in", s.certificateEndsIn(now)},
		{"onboarded", s.onboarded(now)},
		{"spoke ID", s.Status.SpokeID},
	}
	fmt.Fprintf(to, "%s/%s\n\n", s.Namespace, s.Name)
	if err := table(to, rows); err != nil {
		return err
	}
	fmt.Fprintln(to)
	if len(s.Status.NodePools) == 0 {
		fmt.Fprintln(to, "No NodePools are reported. Its shim reports them with --published-node-pools, if the agent has --publish-node-pools.")
	} else {
		rows = [][]string{{"NODEPOOL", "SET", "READY", "NODES", "PENDING", "PRICE/H", "MESSAGE"}}
		for _, pool := range s.Status.NodePools {
			rows = append(rows, []string{
				pool.Name, pool.Set, yesOrNo(pool.Ready), strconv.Itoa(int(pool.Nodes)), strconv.Itoa(int(pool.PendingNodeClaims)),
				cmp.Or(pool.PricePerHour, "unknown"), oneLine(pool.Message),
			})
		}
		if err := table(to, rows); err != nil {
			return err
		}
		if more := s.Status.MoreNodePools; more > 0 {
			fmt.Fprintf(to, "and %d more\n", more)
		}
	}
	if len(s.Status.Published) == 0 {
		return nil
	}
	fmt.Fprintln(to)
	rows = [][]string{{"PUBLISHED", "SET", "APPLIED", "MESSAGE"}}
	for _, object := range s.Status.Published {
		rows = append(rows, []string{object.Kind + "/" + object.Name, object.Set, yesOrNo(object.Applied), oneLine(object.Message)})
	}
	return table(to, rows)
}

func yesOrNo(is bool) string { return lo.Ternary(is, "yes", "no") }

func since(at *metav1.Time, now time.Time) string {
	if at.IsZero() {
		return ""
	}
	return explain.Age(now.Sub(at.Time)) + " ago"
}
