package simprovider

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// clusters provides access to workload clusters.
type clusters interface {
	// client returns an uncached client to the cluster. The error is NotFound if the cluster has no
	// kubeconfig Secret.
	client(ctx context.Context, cluster client.ObjectKey) (client.Client, error)
	// serverVersion returns the version that the cluster's API server reports, such as v1.36.3.
	serverVersion(ctx context.Context, cluster client.ObjectKey) (string, error)
}

// MachinesKubeconfig returns the name of the Secret, in the Cluster's namespace, with the
// kubeconfig of its simulated kubelets. Real kubelets have their own credentials, so machines join
// and run even if Cluster API has lost its access. The Secret is optional: without it the kubelets
// use Cluster API's kubeconfig.
func MachinesKubeconfig(cluster string) string { return cluster + "-machines-kubeconfig" }

// workloads creates clients for workload clusters from their kubeconfig Secrets. It is safe for
// concurrent use.
type workloads struct {
	hub client.Reader

	mu      sync.Mutex
	configs map[client.ObjectKey]workload
}

// workload is a cluster's connection. It is valid while the Secret that it was created from has the
// given version.
type workload struct {
	version string
	config  *rest.Config
	client  client.Client
}

func newWorkloads(hub client.Reader) *workloads {
	return &workloads{hub: hub, configs: map[client.ObjectKey]workload{}}
}

func (w *workloads) client(ctx context.Context, cluster client.ObjectKey) (client.Client, error) {
	connection, err := w.connection(ctx, cluster)
	return connection.client, err
}

func (w *workloads) serverVersion(ctx context.Context, cluster client.ObjectKey) (string, error) {
	connection, err := w.connection(ctx, cluster)
	if err != nil {
		return "", err
	}
	d, err := discovery.NewDiscoveryClientForConfig(connection.config)
	if err != nil {
		return "", err
	}
	version, err := d.ServerVersion()
	if err != nil {
		return "", fmt.Errorf("asking cluster %s for its version: %w", cluster, err)
	}
	return version.GitVersion, nil
}

func (w *workloads) connection(ctx context.Context, cluster client.ObjectKey) (workload, error) {
	secret, err := w.secret(ctx, cluster)
	if err != nil {
		return workload{}, fmt.Errorf("reading the kubeconfig of cluster %s: %w", cluster, err)
	}
	version := secret.Name + "/" + secret.ResourceVersion
	w.mu.Lock()
	defer w.mu.Unlock()
	if known, ok := w.configs[cluster]; ok && known.version == version {
		return known, nil
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data["value"])
	if err != nil {
		return workload{}, fmt.Errorf("parsing the kubeconfig of cluster %s: %w", cluster, err)
	}
	config.UserAgent = "sim-provider"
	config.QPS, config.Burst = 100, 200
	c, err := client.New(config, client.Options{})
	if err != nil {
		return workload{}, fmt.Errorf("connecting to cluster %s: %w", cluster, err)
	}
	w.configs[cluster] = workload{version: version, config: config, client: c}
	return w.configs[cluster], nil
}

// secret returns the Secret with the kubeconfig of the cluster's machines, or else the one that
// Cluster API uses.
func (w *workloads) secret(ctx context.Context, cluster client.ObjectKey) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	err := w.hub.Get(ctx, client.ObjectKey{Namespace: cluster.Namespace, Name: MachinesKubeconfig(cluster.Name)}, secret)
	if apierrors.IsNotFound(err) {
		err = w.hub.Get(ctx, client.ObjectKey{Namespace: cluster.Namespace, Name: cluster.Name + "-kubeconfig"}, secret)
	}
	return secret, err
}
