package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/pki"
)

// joinHub connects to the hub of another sandbox, and uses the authorities that its agents trust.
func (s *Sandbox) joinHub(ctx context.Context) error {
	of := Options{Name: s.options.HubOf, Root: s.options.Root}
	running, err := Running(of)
	if err != nil {
		return err
	}
	state, err := ReadState(of)
	if err != nil && !errors.Is(err, ErrNoState) {
		return err
	}
	if !running || state.Phase != Ready || state.AgentAddress == "" {
		return fmt.Errorf("sandbox %q is not a hub with an agent that is ready: bring it up first", of.Name)
	}
	data, err := os.ReadFile(state.Paths.HubKubeconfig)
	if err != nil {
		return err
	}
	admin, err := clientcmd.RESTConfigFromKubeConfig(data)
	if err != nil {
		return err
	}
	admin.QPS, admin.Burst = adminQPS, adminBurst
	s.hub = &controlPlane{name: "hub", server: admin.Host, admin: admin, kubeconfigFile: state.Paths.HubKubeconfig, kubeconfigData: data}
	s.update(func(mine *State) {
		mine.Paths.HubKubeconfig = state.Paths.HubKubeconfig
		mine.AgentAddress, mine.AgentAddresses, mine.AgentMetrics = state.AgentAddress, state.AgentAddresses, state.AgentMetrics
		mine.HubEtcdMetrics = state.HubEtcdMetrics
	})
	hub, err := s.HubClient()
	if err != nil {
		return err
	}
	if err := s.clearName(ctx, hub); err != nil {
		return err
	}
	s.options.Authority, err = authorityIn(ctx, hub)
	return err
}

// clearName makes sure that the hub has nothing of the spoke's name. A Cluster of that name that
// was deleted leaves its secrets, which name another API server.
func (s *Sandbox) clearName(ctx context.Context, hub client.Client) error {
	switch err := hub.Get(ctx, s.Cluster(), &clusterv1.Cluster{}); {
	case err == nil:
		return fmt.Errorf("there is a Cluster %s already: delete it there, or choose another name", s.Cluster())
	case !apierrors.IsNotFound(err):
		return err
	}
	err := hub.DeleteAllOf(ctx, &corev1.Secret{}, client.InNamespace(s.Cluster().Namespace),
		client.MatchingLabels{clusterv1.ClusterNameLabel: s.Cluster().Name})
	if err != nil {
		return fmt.Errorf("deleting what a Cluster %s has left: %w", s.Cluster(), err)
	}
	return nil
}

// authorityIn reads the authority with which a hub's agents issue certificates.
func authorityIn(ctx context.Context, hub client.Client) (*Authority, error) {
	var issuer corev1.Secret
	if err := hub.Get(ctx, client.ObjectKey{Namespace: agentNamespace, Name: issuerSecret}, &issuer); err != nil {
		return nil, fmt.Errorf("reading the authority of the agents: %w", err)
	}
	ca, err := pki.ReadCA(pki.Pair{Certificate: issuer.Data[corev1.TLSCertKey], Key: issuer.Data[corev1.TLSPrivateKeyKey]})
	if err != nil {
		return nil, fmt.Errorf("reading the authority of the agents: %w", err)
	}
	return &Authority{ca}, nil
}
