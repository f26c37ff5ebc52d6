package sandbox

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/manifests"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/simprovider"
)

const (
	// ClusterNamespace is the namespace of the spoke's Cluster in the hub.
	ClusterNamespace = "fleet"
	// ClusterName is the Cluster's name, unless [Options].Cluster is set.
	ClusterName = "spoke"
	// BootstrapSecret is a Secret in the Cluster's namespace that MachineDeployments can name as
	// their bootstrap data. For a Cluster with another name, the Secret's name begins with that
	// name.
	BootstrapSecret = ClusterName + bootstrapSuffix
	// KubeletLabel is on a Node of the spoke while its kubelet lives and kwok acts for it.
	KubeletLabel = simprovider.KubeletLabel
	// PriceList is the ConfigMap in the hub from which the agent reads prices, as namespace/name.
	// The sandbox does not create it.
	PriceList = ClusterNamespace + "/prices"

	bootstrapSuffix = "-bootstrap"
)

// createFleet creates the spoke's Cluster in the hub.
//
// With a topologyVersion the Cluster is created from a ClusterClass.
func createFleet(ctx context.Context, hub client.Client, spoke *controlPlane, clusterName, topologyVersion string) error {
	discover, err := discovery.NewDiscoveryClientForConfig(spoke.admin)
	if err != nil {
		return err
	}
	version, err := discover.ServerVersion()
	if err != nil {
		return fmt.Errorf("asking the spoke for its version: %w", err)
	}
	endpoint, err := url.Parse(spoke.server)
	if err != nil {
		return err
	}
	port, err := strconv.ParseInt(endpoint.Port(), 10, 32)
	if err != nil {
		return err
	}
	metadata := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: ClusterNamespace, Name: name,
			// Of these Secrets, `clusterctl move` only recognises the one with Cluster API's
			// kubeconfig as the Cluster's by its name.
			Labels: map[string]string{clusterv1.ClusterNameLabel: clusterName, manifests.MoveLabel: ""},
		}
	}
	at := clusterv1.APIEndpoint{Host: endpoint.Hostname(), Port: int32(port)}
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: ClusterNamespace, Name: clusterName}}
	var parts []client.Object
	if topologyVersion != "" {
		cluster.Spec.Topology = clusterv1.Topology{ClassRef: clusterv1.ClusterClassRef{Name: ClusterClass}, Version: topologyVersion}
		parts = clusterClass(at)
	} else {
		cluster.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
			APIGroup: simv1.GroupVersion.Group, Kind: "SimCluster", Name: clusterName,
		}
		cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{
			APIGroup: simv1.GroupVersion.Group, Kind: "SimControlPlane", Name: clusterName,
		}
		parts = []client.Object{
			&simv1.SimCluster{ObjectMeta: metadata(clusterName)},
			&simv1.SimControlPlane{
				ObjectMeta: metadata(clusterName),
				Spec:       simv1.SimControlPlaneSpec{Version: version.GitVersion, ControlPlaneEndpoint: at},
			},
		}
	}
	return manifests.Create(ctx, hub, append([]client.Object{
		&corev1.Secret{
			ObjectMeta: metadata(clusterName + "-kubeconfig"),
			Type:       clusterv1.ClusterSecretType,
			Data:       map[string][]byte{"value": spoke.kubeconfigData},
		},
		&corev1.Secret{
			ObjectMeta: metadata(simprovider.MachinesKubeconfig(clusterName)),
			Type:       clusterv1.ClusterSecretType,
			Data:       map[string][]byte{"value": spoke.kubeconfigData},
		},
		&corev1.Secret{
			ObjectMeta: metadata(clusterName + bootstrapSuffix),
			Type:       clusterv1.ClusterSecretType,
			Data:       simprovider.BootstrapData(),
		},
	}, append(parts, cluster)...)...)
}

// awaitFleet waits until Cluster API has connected to the spoke.
func awaitFleet(ctx context.Context, hub client.Client, key client.ObjectKey) error {
	var (
		cluster clusterv1.Cluster
		state   string
	)
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		if err := hub.Get(ctx, key, &cluster); err != nil {
			return false, err
		}
		infrastructure := meta.IsStatusConditionTrue(cluster.Status.Conditions, clusterv1.ClusterInfrastructureReadyCondition)
		initialized := ptr.Deref(cluster.Status.Initialization.ControlPlaneInitialized, false)
		connected := meta.IsStatusConditionTrue(cluster.Status.Conditions, clusterv1.ClusterRemoteConnectionProbeCondition)
		state = fmt.Sprintf("infrastructure ready: %t, control plane initialized: %t, connected: %t", infrastructure, initialized, connected)
		return infrastructure && initialized && connected, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for Cluster %s (%s): %w", key, state, err)
	}
	return nil
}
