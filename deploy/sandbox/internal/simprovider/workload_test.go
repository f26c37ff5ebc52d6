package simprovider

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// kubeconfigOf returns a Secret with a kubeconfig for the given server.
func kubeconfigOf(t *testing.T, name, server string) *corev1.Secret {
	t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["spoke"] = &clientcmdapi.Cluster{Server: server}
	config.Contexts["spoke"] = &clientcmdapi.Context{Cluster: "spoke"}
	config.CurrentContext = "spoke"
	data, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string][]byte{"value": data}}
}

func TestMachinesReachTheirClusterWithCredentialsOfTheirOwn(t *testing.T) {
	cluster := client.ObjectKey{Namespace: "fleet", Name: "spoke"}
	hub := fake.NewClientBuilder().Build()
	w := newWorkloads(hub)
	reaches := func(server string) {
		t.Helper()
		connection, err := w.connection(t.Context(), cluster)
		if err != nil {
			t.Fatal(err)
		}
		if connection.config.Host != server {
			t.Errorf("the machines reach %s, want %s", connection.config.Host, server)
		}
	}
	change := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	if _, err := w.connection(t.Context(), cluster); !apierrors.IsNotFound(err) {
		t.Errorf("without a kubeconfig: %v, want NotFound", err)
	}
	shared := kubeconfigOf(t, "spoke-kubeconfig", "https://a.example")
	change(hub.Create(t.Context(), shared))
	reaches("https://a.example")
	own := kubeconfigOf(t, MachinesKubeconfig("spoke"), "https://b.example")
	change(hub.Create(t.Context(), own))
	reaches("https://b.example")
	shared.Data = kubeconfigOf(t, shared.Name, "https://c.example").Data
	change(hub.Update(t.Context(), shared))
	reaches("https://b.example")
	change(hub.Delete(t.Context(), own))
	reaches("https://c.example")
}
