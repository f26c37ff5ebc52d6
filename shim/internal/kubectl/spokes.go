package kubectl

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
	} `json:"status"`
}

func spokesCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "spokes",
		Short: "Show the workload clusters whose Karpenter calls the agent; needs the management cluster's kubeconfig",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			kube, err := access.Hub()
			if err != nil {
				return err
			}
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(spokeKind.GroupVersion().WithKind("SpokeList"))
			var options []client.ListOption
			if access.Namespace != "" {
				options = append(options, client.InNamespace(access.Namespace))
			}
			if err := kube.List(cmd.Context(), list, options...); err != nil {
				return problem(fmt.Errorf("reading the Spokes: %w", err),
					"See whether --hub-kubeconfig and --hub-context name the management cluster, and whether the agent's CRDs are there.")
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

func writeSpokes(to io.Writer, spokes []spoke, wide bool, now time.Time) error {
	slices.SortFunc(spokes, func(x, y spoke) int {
		return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
	header := []string{"CLUSTER", "CONNECTED", "LAST SYNC", "SHIM", "CERTIFICATE ENDS IN", "ONBOARDED"}
	if wide {
		header = append(header, "SPOKE ID", "SERIAL", "MESSAGE")
	}
	rows := [][]string{header}
	for i := range spokes {
		s := &spokes[i]
		connected, message := "unknown", ""
		if condition := apimeta.FindStatusCondition(s.Status.Conditions, "Connected"); condition != nil {
			connected, message = string(condition.Status)+" ("+condition.Reason+")", condition.Message
		}
		row := []string{s.Namespace + "/" + s.Name, connected, since(s.Status.LastSyncTime, now), s.Status.ShimVersion, "", ""}
		serial := ""
		if certificate := s.Status.Certificate; certificate != nil {
			serial = certificate.Serial
			if ends := certificate.NotAfter; ends != nil {
				row[4] = "ended"
				if ends.After(now) {
					row[4] = explain.Age(ends.Sub(now))
				}
			}
		}
		if s.Spec.Enrollment != nil {
			row[5] = since(&s.Spec.Enrollment.Time, now)
		}
		if wide {
			row = append(row, s.Status.SpokeID, serial, oneLine(message))
		}
		rows = append(rows, row)
	}
	return table(to, rows)
}

func since(at *metav1.Time, now time.Time) string {
	if at.IsZero() {
		return ""
	}
	return explain.Age(now.Sub(at.Time)) + " ago"
}
