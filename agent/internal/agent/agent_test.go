package agent_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"runtime/pprof"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
)

var (
	plane *capitest.ControlPlane
	// hub is the client configuration of the agents.
	hub *rest.Config
)

func TestMain(m *testing.M) {
	begun := time.Now()
	if namespace := os.Getenv(agentProcess); namespace != "" {
		log.SetLogger(logr.Discard())
		if err := runAgentProcess(begun, namespace, os.Args[1], os.Args[2], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if os.Getenv(servingProcess) != "" {
		log.SetLogger(logr.Discard())
		fmt.Fprintln(os.Stderr, runServingProcess(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]))
		os.Exit(1)
	}
	// Flags are parsed before anything is started, because an unknown flag ends the process.
	flag.Parse()
	log.SetLogger(logr.Discard())
	if os.Getenv("AGENT_TEST_LOG") != "" {
		log.SetLogger(funcr.New(func(prefix, args string) { fmt.Fprintln(os.Stderr, prefix, args) }, funcr.Options{Verbosity: 1}))
	}
	var err error
	if plane, err = capitest.StartControlPlane(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := 1
	if hub, err = confine(plane); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	if err := plane.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// testOptions returns options for a single namespace, without other listeners.
func testOptions(namespace string) *options.Options {
	o := options.New()
	o.Namespaces, o.PublishNodePools = []string{namespace}, true
	o.MetricsBindAddress, o.HealthProbeBindAddress = "0", "0"
	o.KubeAPIQPS, o.KubeAPIBurst = 1000, 1000
	// Other tests may be using the machine.
	o.ShutdownGracePeriod = time.Minute
	return o
}

// running is an agent that serves over mutual TLS on loopback.
type running struct {
	t         testing.TB
	agent     *agent.Agent
	address   string
	authority *testpki.Authority
	files     testpki.Files // its own certificate and authorities
	stop      func()

	mu      sync.Mutex
	clients map[string]*client.Client
}

// start runs an agent for the duration of a test and waits until its view is complete.
func start(tb testing.TB, c agent.Config) *running {
	tb.Helper()
	return startFor(tb, testpki.New(tb), c)
}

// startFor is like [start], for callers whose certificates the authority signs.
func startFor(tb testing.TB, authority *testpki.Authority, c agent.Config) *running {
	tb.Helper()
	r := &running{t: tb, authority: authority, clients: map[string]*client.Client{}}
	if c.Hub == nil {
		c.Hub = hub
	}
	if c.Log.GetSink() == nil {
		c.Log = log.Log
	}
	// Other tests may be using the machine: a slow request is no outage.
	c.HubPatience, c.SpokeWriteTimeout = cmp.Or(c.HubPatience, patience), cmp.Or(c.SpokeWriteTimeout, patience)
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	r.agent, err = agent.New(ctx, c)
	require.NoError(tb, err)
	r.files = r.authority.Issue(tb, tb.TempDir(), r.authority)
	listener, release, err := server.ListenTLS(ctx, "127.0.0.1:0", server.TLSFiles{
		CertFile: r.files.CertFile, KeyFile: r.files.KeyFile, ClientCAFile: r.files.CAFile,
	})
	require.NoError(tb, err)
	r.address = listener.Addr().String()
	ended := make(chan error, 1)
	go func() { ended <- r.agent.Run(ctx, listener) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		err := <-ended
		if err != nil {
			// The stacks show what hangs.
			_ = pprof.Lookup("goroutine").WriteTo(tb.Output(), 1)
		}
		require.NoError(tb, err)
		release()
	})
	tb.Cleanup(func() {
		for _, c := range r.clients {
			require.NoError(tb, c.Close())
		}
		r.stop()
	})
	eventually(tb, "the agent's view is complete", func(context.Context) (bool, error) { return r.agent.Synced(), nil })
	return r
}

// client returns a client with the identity of a Cluster.
func (r *running) client(namespace, cluster string) *client.Client {
	r.t.Helper()
	return r.as("spiffe://karpenter-capi/cluster/" + namespace + "/" + cluster)
}

// as returns a client with a certificate for the URI names.
func (r *running) as(uris ...string) *client.Client {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	key := fmt.Sprint(uris)
	if c := r.clients[key]; c != nil {
		return c
	}
	files := r.authority.Issue(r.t, r.t.TempDir(), r.authority, uris...)
	c, err := client.New(client.Options{
		Address: r.address, TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile}, Timeout: patience,
	})
	require.NoError(r.t, err)
	r.clients[key] = c
	return c
}
