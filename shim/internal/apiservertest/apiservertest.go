// Package apiservertest runs a real kube-apiserver, for tests of what only a real one does:
// validation, server-side apply, and the enforcement of rights.
package apiservertest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

const (
	// assetsVariable names the folder of etcd and kube-apiserver, as for [envtest.Environment].
	assetsVariable = "KUBEBUILDER_ASSETS"
	// crdsWithin bounds how long the server takes to serve the CRDs. The machine may be busy with
	// other tests.
	crdsWithin = time.Minute
)

// ErrNoBinaries is returned if there is no kube-apiserver to run.
var ErrNoBinaries = errors.New("needs etcd and kube-apiserver in " + assetsVariable + " or bin; make tools builds them")

// Server is a running API server.
type Server struct {
	*envtest.Environment

	// Client reads and writes as an administrator, without a cache.
	Client client.WithWatch
}

// Run runs etcd and kube-apiserver on loopback, with the CRDs of the charts in deploy/charts. The
// caller must call Stop. The error is [ErrNoBinaries] if there are none.
func Run(charts ...string) (*Server, error) {
	_ = os.Getenv("TESTED_CHARTS") // declares the charts' CRDs as inputs of the test cache
	root, err := repository()
	if err != nil {
		return nil, err
	}
	assets := os.Getenv(assetsVariable)
	if assets == "" {
		assets = filepath.Join(root, "bin")
	}
	if _, err := os.Stat(filepath.Join(assets, "kube-apiserver")); err != nil { //nolint:gosec // the folder is named by the user who runs the tests
		return nil, fmt.Errorf("%w: %w", ErrNoBinaries, err)
	}
	environment := &envtest.Environment{
		BinaryAssetsDirectory: assets,
		CRDInstallOptions:     envtest.CRDInstallOptions{ErrorIfPathMissing: true, MaxTime: crdsWithin},
	}
	for _, chart := range charts {
		environment.CRDInstallOptions.Paths = append(environment.CRDInstallOptions.Paths, filepath.Join(root, "deploy", "charts", chart, "files", "crds"))
	}
	config, err := environment.Start()
	if err != nil {
		return nil, errors.Join(err, environment.Stop())
	}
	kube, err := client.NewWithWatch(config, client.Options{Scheme: scheme.Scheme})
	if err != nil {
		return nil, errors.Join(err, environment.Stop())
	}
	return &Server{Environment: environment, Client: kube}, nil
}

// Start is [Run] until the test has ended. It skips the test if there are no binaries.
func Start(tb testing.TB, charts ...string) *Server {
	tb.Helper()
	server, err := Run(charts...)
	if errors.Is(err, ErrNoBinaries) {
		tb.Skip(err)
	}
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, server.Stop()) })
	return server
}

// KubeconfigOf returns a kubeconfig for a new user in these groups.
func (s *Server) KubeconfigOf(tb testing.TB, name string, groups ...string) []byte {
	tb.Helper()
	user, err := s.AddUser(envtest.User{Name: name, Groups: groups}, nil)
	require.NoError(tb, err)
	kubeconfig, err := user.KubeConfig()
	require.NoError(tb, err)
	return kubeconfig
}

// repository returns the folder above the working directory that contains go.work.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		_, err := os.Stat(filepath.Join(dir, "go.work"))
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return dir, err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("the working directory is not in the repository")
		}
		dir = parent
	}
}
