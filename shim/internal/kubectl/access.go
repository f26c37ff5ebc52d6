package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// Access reaches the clusters and the agent that the options name. It is safe for concurrent use.
// The zero value with options is ready to use.
type Access struct {
	*Options

	mu         sync.Mutex
	spoke, hub client.Client
	once       sync.Once
	shim       *shim
	shimErr    error
}

// Agent is a connection to an agent.
type Agent struct {
	*agentclient.Client

	Address string
	Cluster *agentv1alpha1.ClusterRef
}

// userAgent is what the API servers and the agent log.
const userAgent = "kubectl-capi"

func (a *Access) config(kubeconfig, context string) (*rest.Config, clientcmd.ClientConfig, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context})
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, nil, err
	}
	config.QPS, config.Timeout, config.UserAgent = -1, a.Timeout, userAgent
	config.WarningHandler = rest.NoWarnings{}
	return config, loader, nil
}

// SpokeConfig returns the configuration for the workload cluster.
func (a *Access) SpokeConfig() (*rest.Config, error) {
	config, _, err := a.config(a.Kubeconfig, a.Context)
	if err != nil {
		return nil, problem(fmt.Errorf("finding the spoke: %w", err), "Name its kubeconfig: --kubeconfig, --context.")
	}
	return config, nil
}

// PodNamespace returns the namespace that pods are looked for in.
func (a *Access) PodNamespace() string {
	if a.Namespace != "" {
		return a.Namespace
	}
	if _, loader, err := a.config(a.Kubeconfig, a.Context); err == nil {
		if namespace, _, err := loader.Namespace(); err == nil && namespace != "" {
			return namespace
		}
	}
	return corev1.NamespaceDefault
}

// Spoke returns a client for the workload cluster.
func (a *Access) Spoke() (client.Client, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.spoke != nil {
		return a.spoke, nil
	}
	config, err := a.SpokeConfig()
	if err != nil {
		return nil, err
	}
	a.spoke, err = client.New(config, client.Options{Scheme: scheme.Scheme, Mapper: mapper()})
	return a.spoke, err
}

func (a *Access) hasHub() bool { return a.HubKubeconfig != "" || a.HubContext != "" }

// Hub returns a client for the management cluster.
func (a *Access) Hub() (client.Client, error) {
	if !a.hasHub() {
		return nil, problem(errors.New("this needs the hub"), "Name its kubeconfig: --hub-kubeconfig, or its context: --hub-context.")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hub != nil {
		return a.hub, nil
	}
	config, _, err := a.config(cmp.Or(a.HubKubeconfig, a.Kubeconfig), a.HubContext)
	if err != nil {
		return nil, problem(fmt.Errorf("finding the hub: %w", err), "See --hub-kubeconfig and --hub-context.")
	}
	a.hub, err = client.New(config, client.Options{Scheme: scheme.Scheme, Mapper: mapper()})
	return a.hub, err
}

const kindMachine = "Machine"

// Kinds of the management cluster.
var (
	machineKind           = schema.GroupVersionKind{Group: "cluster.x-k8s.io", Version: "v1beta2", Kind: kindMachine}
	machineDeploymentKind = schema.GroupVersionKind{Group: "cluster.x-k8s.io", Version: "v1beta2", Kind: "MachineDeployment"}
	machineClaimKind      = schema.GroupVersionKind{Group: "agent.karpenter.cluster.x-k8s.io", Version: "v1alpha1", Kind: "MachineClaim"}
	spokeKind             = schema.GroupVersionKind{Group: "agent.karpenter.cluster.x-k8s.io", Version: "v1alpha1", Kind: "Spoke"}
)

// mapper maps the kinds that are read, without asking an API server what it has: that would take
// longer than everything else.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	core, apps := corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion
	karpenter := schema.GroupVersion{Group: "karpenter.sh", Version: "v1"}
	for _, kind := range []schema.GroupVersionKind{
		core.WithKind("Node"), core.WithKind("Namespace"),
		karpenter.WithKind("NodePool"), karpenter.WithKind("NodeClaim"),
		{Group: v1alpha1.Group, Version: "v1alpha1", Kind: "ClusterAPINodeClass"},
	} {
		m.Add(kind, meta.RESTScopeRoot)
	}
	for _, kind := range []schema.GroupVersionKind{
		core.WithKind("Pod"), core.WithKind("Event"), core.WithKind("Secret"), apps.WithKind("Deployment"),
		machineKind, machineDeploymentKind, machineClaimKind, spokeKind,
	} {
		m.Add(kind, meta.RESTScopeNamespace)
	}
	return m
}

// deployment returns what Karpenter's Deployment says. It is read once.
func (a *Access) deployment(ctx context.Context) (*shim, error) {
	a.once.Do(func() { a.shim, a.shimErr = a.findShim(ctx) })
	return a.shim, a.shimErr
}

// Workload returns how many pods of Karpenter are ready, or nil if its Deployment was not needed or
// not found.
func (a *Access) Workload(ctx context.Context) *explain.Workload {
	if !a.needsShim() {
		return nil
	}
	s, err := a.deployment(ctx)
	if err != nil {
		return nil
	}
	return &s.workload
}

// needsShim reports whether the flags leave something to Karpenter's Deployment.
func (a *Access) needsShim() bool {
	return a.AgentAddress == "" || !a.ownIdentity()
}

// ownIdentity reports whether the flags name how to call the agent.
func (a *Access) ownIdentity() bool {
	return a.TLSDir != "" || a.PlaintextLoopback || strings.HasPrefix(a.AgentAddress, "unix:")
}

// Agent connects to the agent, for a Cluster. The caller closes the connection. It makes no call,
// unless it has to ask for the name of the Cluster.
func (a *Access) Agent(ctx context.Context) (*Agent, error) {
	agent, err := a.connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.nameCluster(ctx, agent); err != nil {
		_ = agent.Close()
		return nil, err
	}
	return agent, nil
}

// connect connects to the agent. The Cluster is Karpenter's, or nil if Karpenter's Deployment is
// not needed. The caller closes the connection. It makes no call.
func (a *Access) connect(ctx context.Context) (*Agent, error) {
	options := agentclient.Options{
		Address: a.AgentAddress, PlaintextLoopback: a.PlaintextLoopback, Timeout: a.Timeout, UserAgent: userAgent,
	}
	tls := &agentclient.TLS{ServerName: a.ServerName}
	var cluster *agentv1alpha1.ClusterRef
	if a.needsShim() {
		s, err := a.deployment(ctx)
		if err != nil {
			return nil, err
		}
		cluster = s.cluster
		if err := a.like(s, &options, tls); err != nil {
			return nil, err
		}
		if !a.ownIdentity() {
			if tls.Source, err = a.certificate(ctx, s); err != nil {
				return nil, err
			}
		}
	}
	if a.TLSDir != "" {
		tls.CertFile, tls.KeyFile = filepath.Join(a.TLSDir, "tls.crt"), filepath.Join(a.TLSDir, "tls.key")
		tls.CAFile = filepath.Join(a.TLSDir, "ca.crt")
	}
	if tls.Source != nil || tls.CertFile != "" {
		options.TLS = tls
	}
	made, err := agentclient.New(options)
	if err != nil {
		return nil, problem(err, "See --agent-address, --tls-dir and --plaintext-loopback.")
	}
	return &Agent{Client: made, Address: options.Address, Cluster: cluster}, nil
}

// like takes from the shim what the flags leave open.
func (a *Access) like(s *shim, options *agentclient.Options, tls *agentclient.TLS) error {
	if options.Address != "" {
		tls.ServerName = cmp.Or(tls.ServerName, s.host()) // the agent's certificate is for the address that the shim uses
		return nil
	}
	if s.plaintext || strings.HasPrefix(s.address, "unix:") {
		return problem(fmt.Errorf("karpenter's agent at %s can be reached only from its own pod", s.address),
			"Give the agent a network address (docs/install.md), and name it: --agent-address and --tls-dir.")
	}
	options.Address, tls.ServerName = s.address, cmp.Or(tls.ServerName, s.serverName)
	return nil
}

// nameCluster sets the agent's Cluster: from the flag, from the shim, or as the only one that the
// certificate is for.
func (a *Access) nameCluster(ctx context.Context, agent *Agent) error {
	if a.Cluster != "" {
		namespace, name, err := split(a.Cluster)
		if err != nil {
			return err
		}
		agent.Cluster = &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}
	}
	if agent.Cluster != nil {
		return nil
	}
	status, err := agent.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	if err != nil {
		return agentProblem(err, agent)
	}
	if len(status.GetClusters()) != 1 {
		return problem(fmt.Errorf("the identity %s is for more than one Cluster, or for none", status.GetIdentity()),
			"Choose the spoke's: --cluster=<namespace>/<name>.")
	}
	agent.Cluster = status.GetClusters()[0]
	return nil
}

// HubCluster returns the workload cluster's Cluster as far as it is known without the agent, or
// nil.
func (a *Access) HubCluster(ctx context.Context) *agentv1alpha1.ClusterRef {
	if namespace, name, err := split(a.Cluster); err == nil {
		return &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}
	}
	if s, err := a.deployment(ctx); err == nil {
		return s.cluster
	}
	return nil
}

func nameOf(cluster *agentv1alpha1.ClusterRef) string {
	return cluster.GetNamespace() + "/" + cluster.GetName()
}
